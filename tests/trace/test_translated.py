"""Flows to whose packets somebody on the way gives another source: a pod's CNI where they leave the cluster, or a stranger's rule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from schemas.values import FAMILIES, IPV4, IPV6, Address, Family
from services.auditor.trace.trails import Trail
from services.auditor.trace.verdicts import courses
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY
from services.cli.trace.ends import session
from tests.speakers import opened, received
from tests.trace.flows import seen
from tests.trace.site import Rome
from tests.tracing import ONE, PODS, recording

pytestmark = pytest.mark.privileged

PORT = 7000
OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
POD = {name: dict(zip(FAMILIES, PODS[name], strict=True)) for name in ("shop", "stock")}
NODE = {IPV4: Address("172.18.0.11"), IPV6: Address("2001:db8:18::11")}
OUT = ("FROM_ENDPOINT", "TO_STACK", "TO_NETWORK")


@pytest.fixture(autouse=True)
def outsider(rome: Rome) -> None:
    rome.turn()
    rome.forget_traces()
    namespaces.script([f"address replace {address.host_prefix} dev br0" for address in OUTSIDE.values()], UNDERLAY)


@contextlib.contextmanager
def masqueraded(rome: Rome, family: Family, how: str = "", *, unmarked: bool = False) -> Iterator[None]:
    """The first node gives its own address to what `shop` sends by the uplink; `unmarked`, it encrypts nothing to `stock`."""
    table = "ip" if family == IPV4 else "ip6"
    rules = f"chain out {{ type nat hook postrouting priority 90; {table} saddr {POD['shop'][family]} oifname eth0 masquerade {how}; }}"
    if unmarked:
        to = POD["stock"][family]
        rules += f"; chain off {{ type filter hook prerouting priority -80; {table} daddr {to} meta mark set 0; }}"
    rome.hosts[ONE].run("nft", f"table {table} others {{ {rules}; }}")
    try:
        yield
    finally:
        rome.hosts[ONE].run("nft", f"delete table {table} others")


async def told(rome: Rome, ends: tuple[str, str], *, answered: bool = True, by_node: bool = False) -> list[Trail]:
    """The packets of a traced flow, while `shop` says something to the other end, which answers; and with `by_node`, its node, too."""
    core = rome.mesh.core
    wanted = session(core.state, core.allocations, ends, None, 60)
    there = ends[1] if "/" not in ends[1] else ends[0]
    with recording({host: rome.hosts[host] for host in wanted.hosts}) as recorder:
        for wish in set(wanted.hosts.values()):
            recorder.lend(wish)
        to = Address(there) if "/" not in there else POD["stock"][IPV4]
        place = "underlay" if "/" not in there else "rome.pod.stock"
        for speaker in ("rome.pod.shop", *(["rome.worker-1"] if by_node else [])):
            with opened(speaker, to.family) as client, opened(place, to.family, port=PORT, address=to) as server:
                client.sendto(b"there", (to, PORT))
                _, back = await received(server, 10.0)
                server.sendto(b"back", back)
                if answered:
                    await received(client, 10.0)
        recorder.take()
    return seen(rome, wanted, recorder.found)


def points(trail: Trail, node: str = str(ONE)) -> tuple[str, ...]:
    return tuple(event.trace_observation_point for event in trail.at(node))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["", "fully-random"], ids=["same port", "another port"])
async def test_what_a_node_lets_out_by_its_own_address_went_in_clear(rome: Rome, how: str, family: Family) -> None:
    """Both ways, at each point, also where its port is another one outside."""
    with masqueraded(rome, family, how):
        trails = await told(rome, ("rome/shop", OUTSIDE[family]))
    assert [(trail.way, points(trail)) for trail in trails] == [("forward", OUT), ("reply", ("FROM_NETWORK", "TO_ENDPOINT"))]
    assert [(course.way, course.verdict, course.packets) for course in courses(trails)] == [
        ("forward", "plaintext", 1),
        ("reply", "plaintext", 1),
    ]
    first, last = trails[0].at(str(ONE))[0].ip, trails[0].at(str(ONE))[-1].ip
    assert first is not None
    assert last is not None
    assert (first.source, first.source_xlated, last.source) == (POD["shop"][family], NODE[family], NODE[family])


@pytest.mark.parametrize("ends", [("rome/shop", OUTSIDE[IPV4]), ("rome/worker-1", OUTSIDE[IPV4])], ids=["the pod", "the node"])
async def test_of_a_pod_and_its_node_with_one_address_outside_each_has_its_own_packets(rome: Rome, ends: tuple[str, str]) -> None:
    """Though both are traced, and nothing outside tells them apart."""
    core = rome.mesh.core
    both = [session(core.state, core.allocations, (name, OUTSIDE[IPV4]), None, 60) for name in ("rome/shop", "rome/worker-1")]
    for wanted in both:
        for host, wish in wanted.hosts.items():
            rome.hosts[host].trace(wish)
    with masqueraded(rome, IPV4):
        trails = await told(rome, ends, by_node=True)
    begin = "FROM_ENDPOINT" if ends[0] == "rome/shop" else "FROM_HOST"
    assert [(trail.way, trail.seen[0].trace_observation_point) for trail in trails] == [("forward", begin), ("reply", "FROM_NETWORK")]


@pytest.mark.parametrize("how", ["", "fully-random"], ids=["same port", "another port"])
async def test_a_leak_under_another_source_is_a_leak(rome: Rome, how: str) -> None:
    """Somebody takes the mark off what goes to another node's pod, and masquerades it: the far node was not asked for that address."""
    with masqueraded(rome, IPV4, how, unmarked=True):
        trails = await told(rome, ("rome/shop", "rome/stock"))
    (forward,) = [course for course in courses(trails) if course.way == "forward"]
    assert (forward.verdict, forward.packets) == ("plaintext", 1)
    (sent,) = [trail for trail in trails if trail.way == "forward"]
    assert points(sent) == OUT
