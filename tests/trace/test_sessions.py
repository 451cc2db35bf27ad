"""What is asked of hosts for a while: two sessions at once, fragments, outer packets alone, and what is left when it is over."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from schemas.host_objects import TRACE_TABLE
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family
from services.auditor.trace.verdicts import courses
from services.cli.trace.ends import Session
from tests.hosts import NO_GENEVE, LinuxHost, has_geneve
from tests.speakers import opened, received
from tests.trace.flows import seen
from tests.trace.site import Rome
from tests.trace.test_points import NATIVE, points
from tests.tracing import ONE, PODS, Recorder, echo, flows, recording

pytestmark = pytest.mark.privileged

PATIENCE_S = 30.0
PORT = 7000
AGAIN_S = 1.0
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, DONT = 10, 23, 0
NEVER_TOO_LARGE: dict[Family, tuple[int, int, int]] = {
    IPV4: (socket.IPPROTO_IP, IP_MTU_DISCOVER, DONT),
    IPV6: (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, DONT),
}
"""What has a socket's packets fragmented where they do not fit: with IPv6 by the pod, which must know how large they may be."""
HEADER_BYTES: dict[Family, int] = {IPV4: 28, IPV6: 48}


def is_traced(host: LinuxHost) -> bool:
    """Whether the kernel has anything for a trace."""
    return TRACE_TABLE in host.run("nft", "list", "tables")


def verdicts(rome: Rome, wanted: Session, recorder: Recorder) -> list[tuple[str, str, int]]:
    """Each direction, its verdict, and how many packets it has."""
    return [(course.way, course.verdict, course.packets) for course in courses(seen(rome, wanted, recorder.found))]


@pytest.mark.parametrize("by", ["time", "restart"])
def test_nothing_is_told_once_a_trace_is_over(rome: Rome, by: str) -> None:
    """The kernel takes its rules back when the time is over, and when the applier is gone; no difference to the plan, before or after."""
    rome.turn()
    wanted, host = rome.session("shop", "stock", 1 if by == "time" else 600), rome.hosts[ONE]
    with recording({ONE: host}) as recorder:
        recorder.lend(wanted.hosts[ONE])
        assert is_traced(host)
        assert host.differences(rome.plan(ONE)) == []
        if by == "restart":
            host.restart()
        end = time.monotonic() + PATIENCE_S
        while host.forget_traced() is not None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not is_traced(host)
        assert host.differences(rome.plan(ONE)) == []
        recorder.take()
        told = len(recorder.found[ONE].datagrams)
        assert echo("rome.pod.shop", PODS["stock"][0], recorder) == 1
        assert len(recorder.found[ONE].datagrams) == told
    assert flows(rome.plan(ONE), recorder.found[ONE]) == []


MANY = 10_000


@contextlib.contextmanager
def busy(source: str, to: str) -> Iterator[Callable[[], None]]:
    """One pod sends another all that it can while the body runs; what is given waits until that were many packets more."""
    stopped, sent = threading.Event(), itertools.count()
    with opened(f"rome.pod.{to}", port=PORT), opened(f"rome.pod.{source}") as client:
        client.setblocking(True)

        def send() -> None:
            while not stopped.is_set():
                client.sendto(b"others", (PODS[to][0], PORT))
                next(sent)

        def many() -> None:
            begin, end = next(sent), time.monotonic() + PATIENCE_S
            while next(sent) < begin + MANY:
                assert time.monotonic() < end
                time.sleep(0.01)

        thread = threading.Thread(target=send, name="others")
        thread.start()
        try:
            yield many
        finally:
            stopped.set()
            thread.join()


@pytest.mark.parametrize("by", ["time", "restart"])
def test_a_trace_beside_much_other_traffic_leaves_nothing_in_the_kernel(rome: Rome, by: str) -> None:
    """The others' packets, by the same pod's link and the same uplink, are not told of; when it is over, the rules are those of before."""
    rome.turn()
    rome.forget_traces()
    wanted = rome.session("shop", "stock", 1 if by == "time" else 600)
    hosts = {host: rome.hosts[host] for host in wanted.hosts}
    before = {host: each.run("nft", "-s", "list", "ruleset") for host, each in hosts.items()}
    with recording(hosts) as recorder, busy("shop", "post") as many:
        for wish in set(wanted.hosts.values()):
            recorder.lend(wish)
        assert all(map(is_traced, hosts.values()))
        many()
        assert echo("rome.pod.shop", PODS["stock"][0], recorder) == 1
        if by == "restart":  # the other one may be over by now
            assert verdicts(rome, wanted, recorder) == [("forward", "encrypted", 1), ("reply", "encrypted", 1)]
            rome.forget_traces()
        end = time.monotonic() + PATIENCE_S
        while any(host.forget_traced() is not None for host in hosts.values()):
            assert time.monotonic() < end
            time.sleep(0.05)
        many()
        recorder.take()
        told = [event for host, recorded in recorder.found.items() for event in flows(rome.plan(host), recorded)]
        assert not any(PODS["post"][0] in (event.ip.source, event.ip.destination) for event in told if event.ip)
    assert {host: each.run("nft", "-s", "list", "ruleset") for host, each in hosts.items()} == before
    assert [host.differences(rome.plan(name)) for name, host in hosts.items()] == [[], []]


def test_two_sessions_at_once_are_two_flows(rome: Rome) -> None:
    """Each sees its own packets, and only those."""
    rome.turn()
    one, other = rome.session("shop", "stock"), rome.session("shop", "post")
    hosts = {host: rome.hosts[host] for host in {*one.hosts, *other.hosts}}
    with recording(hosts) as recorder:
        for wish in (*one.hosts.values(), *other.hosts.values()):
            recorder.lend(wish)
        assert echo("rome.pod.shop", PODS["stock"][0], recorder, ident=2) == 1
        assert echo("rome.pod.shop", PODS["post"][0], recorder, ident=3) == 1
    assert verdicts(rome, one, recorder) == [("forward", "encrypted", 1), ("reply", "encrypted", 1)]
    assert verdicts(rome, other, recorder) == [("forward", "plaintext", 1), ("reply", "plaintext", 1)]


SERVICE = {IPV4: Address("10.96.0.1"), IPV6: Address("fd00:96::1")}


@pytest.fixture
def dialled(rome: Rome) -> Iterator[None]:
    """Somebody on the first node leads a service's addresses to `stock`, as kube-proxy does."""
    pod = dict(zip(FAMILIES, PODS["stock"], strict=True))
    for table, family in (("ip", IPV4), ("ip6", IPV6)):
        rule = f"{table} daddr {SERVICE[family]} dnat to {pod[family]}"
        rome.hosts[ONE].run("nft", f"table {table} services {{ chain c {{ type nat hook prerouting priority -100; {rule}; }}; }}")
    yield
    for table in ("ip", "ip6"):
        rome.hosts[ONE].run("nft", f"delete table {table} services")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flow_by_a_services_address_is_followed_through_its_translation(rome: Rome, dialled: None, family: Family) -> None:
    """On the node that translates it: what was dialled, and what became of it; of the answer the reverse."""
    rome.turn()
    rome.forget_traces()
    wanted = rome.session("shop", "stock", services=SERVICE.values())
    with recording({host: rome.hosts[host] for host in wanted.hosts}) as recorder:
        assert echo("rome.pod.shop", SERVICE[family], recorder, ident=4) == 1
        for wish in set(wanted.hosts.values()):
            recorder.lend(wish)
        assert echo("rome.pod.shop", SERVICE[family], recorder, ident=5) == 1
    assert verdicts(rome, wanted, recorder) == [("forward", "encrypted", 1), ("reply", "encrypted", 1)]
    request, answer = seen(rome, wanted, recorder.found)
    assert tuple(map(points, (request, answer))) == (NATIVE, NATIVE)
    (first,) = [event.ip for event in request.seen if event.trace_observation_point == "FROM_ENDPOINT"]
    (last,) = [event.ip for event in answer.seen if event.trace_observation_point == "FROM_CRYPTO"]
    pod = PODS["stock"][FAMILIES.index(family)]
    assert first is not None
    assert (first.destination, first.destination_xlated) == (SERVICE[family], pod)
    assert last is not None
    assert (last.source, last.source_xlated) == (pod, SERVICE[family])


def test_outer_packets_alone_say_nothing_of_a_flow(rome: Rome) -> None:
    """WireGuard's packets between the nodes may carry anything: they are told of, and no end is said to have spoken."""
    rome.turn()
    rome.forget_traces()
    wanted = rome.session("shop", "stock")
    with recording({host: rome.hosts[host] for host in wanted.hosts}) as recorder:
        for wish in set(wanted.hosts.values()):
            recorder.lend(replace(wish, flow=()))
        assert echo("rome.pod.shop", PODS["stock"][0], recorder) == 1
    told = [event for host, recorded in recorder.found.items() for event in flows(rome.plan(host), recorded)]
    assert {(event.trace_observation_point, bool(event.ip and event.ip.encrypted)) for event in told} == {
        ("TO_NETWORK", True),
        ("FROM_NETWORK", True),
    }
    assert verdicts(rome, wanted, recorder) == []


async def arrives(client: socket.socket, server: socket.socket, size: int, family: Family) -> None:
    """Something of this size is heard by `stock`. With IPv6, a pod learns by an error how large its fragments may be."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        client.sendto(bytes(size), (PODS["stock"][FAMILIES.index(family)], PORT))
        with contextlib.suppress(TimeoutError):
            await received(server, AGAIN_S)
            return
    pytest.fail(f"nothing of {size} bytes arrives")


LARGE: dict[str, tuple[dict[str, object], int]] = {
    "native": ({}, 1420),
    "overlay": ({"routing": "overlay"}, 1370),
    "overlay in clear": ({"routing": "overlay", "encryption": "none", "strict": "off"}, 1450),
    "geneve": ({"routing": "overlay", "overlay": "geneve"}, 1370),
    "geneve in clear": ({"routing": "overlay", "overlay": "geneve", "encryption": "none", "strict": "off"}, 1450),
}
"""By way between nodes, the cluster's fields and the largest packet that is not fragmented."""
FRAGMENTED, PIECES = 3028, 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", LARGE)
@pytest.mark.parametrize("fits", [True, False], ids=["whole", "fragmented"])
async def test_a_large_packet_is_one_packet_and_each_outer_one_is_found(rome: Rome, way: str, fits: bool, family: Family) -> None:
    """The rules see a datagram whole, and the ports with it; what carries its fragments is found by their lengths, on both nodes.

    A packet that fills the device's MTU has no padding.
    """
    if way.startswith("geneve") and not has_geneve("mm.underlay"):
        pytest.skip(NO_GENEVE)
    fields, largest = LARGE[way]
    rome.turn(**fields)
    rome.forget_traces()
    wanted, size = rome.session("shop", "stock"), (largest if fits else FRAGMENTED) - HEADER_BYTES[family]
    with opened("rome.pod.shop", family) as client, opened("rome.pod.stock", family, port=PORT) as server:
        client.setsockopt(*NEVER_TOO_LARGE[family])
        await arrives(client, server, size, family)
        with recording({host: rome.hosts[host] for host in wanted.hosts}) as recorder:
            for wish in set(wanted.hosts.values()):
                recorder.lend(wish)
            await arrives(client, server, size, family)
            recorder.take()
    (trail,) = seen(rome, wanted, recorder.found)
    assert verdicts(rome, wanted, recorder) == [("forward", "plaintext" if way.endswith("in clear") else "encrypted", 1)]
    assert {event.l4.udp.destination_port for event in trail.seen if event.l4 and event.l4.udp} == {PORT}
    wire = [link.event for link in trail.outer if link.event.trace_observation_point in ("TO_NETWORK", "FROM_NETWORK")]
    sent, came = ([event.length for event in wire if event.node_name == f"rome/{name}"] for name in ("worker-1", "worker-2"))
    assert sent == came
    assert len(sent) == (1 if fits else PIECES)
    # What is inside an overlay packet names it. Of IPv6's fragments only their length says of which packet they are.
    inside = {(link.corr.method, link.corr.confidence) for link in trail.outer if link.event.tunnel}
    method = "headers" if fits else "headers and lengths of fragments"
    assert inside == (set() if way == "native" else {(method, "high" if family == IPV4 else "inferred")})
