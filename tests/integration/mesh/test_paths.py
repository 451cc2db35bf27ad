"""Every path a packet can take, with both overlays and both modes of sources: real packets, and what the far end sees of them.

One mesh, whose clusters change their overlay and their sources while it is up. Here and in an emulated machine: see CONTRIBUTING.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from schemas.topology import Cluster, Node, Peering, Pod
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family
from services.cli.lab import namespaces
from services.cli.lab.crossing import from_node
from services.cli.lab.expected import Walk, expected
from services.cli.lab.layout import PREFIX
from services.cli.lab.probe import Probe
from tests.captures import Packet, capture
from tests.hosts import NO_GENEVE, has_geneve
from tests.integration.mesh.site import AWARE, OUTSIDE, Site
from tests.sites import WAIT_S
from tests.speakers import opened, received

pytestmark = pytest.mark.privileged

OVERLAY_PORTS = {"vxlan": 4789, "geneve": 6081}
SITES = [pytest.param(site, id="-".join(site)) for site in itertools.product(OVERLAY_PORTS, ("per-node", "shared"))]
TUNNEL_MTU = 1500 - 80
"""Over IPv6, as all tunnels of these clusters go."""
TOO_LARGE_BYTES = TUNNEL_MTU + 5
"""More than a tunnel takes, and less than any overlay link."""
IP_MTU_DISCOVER, IP_MTU, IPV6_MTU_DISCOVER, IPV6_MTU = 10, 14, 23, 24
STRANGERS = itertools.count(10)
PROBE = 2  # IP_PMTUDISC_DO, IPV6_PMTUDISC_DO
received = partial(received, patience_s=WAIT_S)

NODES = [("milan/node/worker-1", "rome/shop"), ("milan/node/worker-2", "rome/shop"), ("rome/node/worker-1", "milan/mill")]
NODES += [("milan/node/worker-1", "turin/bank"), ("milan/node/worker-2", "turin/bank"), ("turin/node/worker-1", "milan/mill")]
PODS = [pair for leaf in ("rome/shop", "turin/bank") for here in ("milan/mill", "milan/mint") for pair in ((leaf, here), (here, leaf))]
PROBED = {
    "pod to pod": PODS,
    "node to pod": NODES,
    "pod to a mapped pod": [("rome/shop", "milan/mapping/mint"), ("turin/bank", "milan/mapping/mint")],
    "pod to a mapped node": [("rome/shop", "milan/mapping/worker-1"), ("turin/bank", "milan/mapping/worker-1")],
    "leaf to leaf over a third cluster": [("rome/shop", "milan/mapping/turin-bank"), ("turin/bank", "milan/mapping/rome-shop")],
}
"""By path, who speaks to whom, as the lab's probes call them; each is answered."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    found = Site(tmp_path_factory.mktemp("site"))
    try:
        found.make()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module", params=SITES)
def overlay_and_sources(request: pytest.FixtureRequest, made: Site) -> tuple[str, str]:
    """What the clusters have, from now on."""
    overlay, sources = request.param
    if overlay == "geneve" and not has_geneve("mm.underlay"):
        pytest.skip(NO_GENEVE)
    made.turn_to(overlay, sources)
    return overlay, sources


@pytest.fixture
def site(made: Site, overlay_and_sources: tuple[str, str]) -> Site:
    return made


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.mark.parametrize("path", PROBED)
async def test_the_far_end_sees_the_right_addresses(site: Site, family: Family, path: str) -> None:
    """By UDP and TCP: the server sees the source and the destination that the topology says, and its answer comes back."""

    def names(probe: Probe) -> tuple[str, str]:
        return probe.client.name, probe.server.name.removesuffix("-6")

    made = await site.carries(lambda probe: probe.family == family and names(probe) in PROBED[path])
    assert sorted(map(names, made)) == sorted(PROBED[path] * 2)


async def test_an_outsider_sees_the_node_that_leads_to_it(site: Site, family: Family) -> None:
    """A pod of rome dials what milan maps to an address outside, which knows neither: it answers the node's own address."""
    with opened("rome.pod.shop", family) as client, opened("underlay", family, address=OUTSIDE[family]) as server:
        sender = await spoken(client, server, site.external(f"outside-{family}", family))
    assert sender[0] == site.address("Node/milan/worker-2", family)


async def test_an_outsider_that_knows_the_way_speaks_as_its_external_address(site: Site, family: Family) -> None:
    """It sees rome's pod as milan does, and the pod hears it from the address that rome dials, whoever of the two begins."""
    seen, pod = (
        site.external(f"aware-{family}", family),
        site.between("milan", "rome", family).dial(site.address("Endpoint/rome/shop", family)),
    )
    way = [pod.host_prefix, "via", site.address("Node/milan/worker-2", family), "dev", "br0", "onlink", "src", AWARE[family]]
    site.run("underlay", "ip", f"-{family}", "route", "add", *way)
    try:
        for begins in ("pod", "outsider"):
            with opened("rome.pod.shop", family) as near, opened("underlay", family, address=AWARE[family]) as far:
                sender = await spoken(near, far, seen) if begins == "pod" else await spoken(far, near, pod)
            assert sender[0] == (pod if begins == "pod" else seen)
    finally:
        site.run("underlay", "ip", f"-{family}", "route", "delete", *way)


async def test_two_nodes_with_one_port_get_their_own_answers(site: Site, family: Family, overlay_and_sources: tuple[str, str]) -> None:
    """Both nodes of milan send from the same port to the same port of turin's pod at once: each hears what it said, and nothing else."""
    near = (opened(f"milan.worker-{which}", family, port=40222) for which in (1, 2))
    walks = [walk_from(site, f"milan.worker-{which}", family) for which in (1, 2)]
    with contextlib.ExitStack() as stack:
        server, one, two = (stack.enter_context(each) for each in (opened("turin.pod.bank", family), *near))
        senders: dict[bytes, tuple[str, int]] = {}
        for sent in range(10):
            for name, client in ((b"one", one), (b"two", two)):
                client.sendto(name, (walks[0].dial, server.getsockname()[1]))
            for _ in range(2):
                data, sender = await received(server)
                assert senders.setdefault(data, sender) == sender, sent
            for data, sender in senders.items():
                server.sendto(data, sender)
            assert [(await received(client))[0] for client in (one, two)] == [b"one", b"two"]
    assert [senders[name][0] for name in (b"one", b"two")] == [walk.seen_source for walk in walks]
    assert len(set(senders.values())) == 2
    assert (senders[b"one"][1], senders[b"two"][1]) == (40222, 40222) or overlay_and_sources[1] == "shared"


async def test_a_node_port_answers_its_client(site: Site, family: Family) -> None:
    """A client outside dials a node of milan, which sends it on to turin's pod; nothing of it leaves the node in clear."""
    walk, address = walk_from(site, "milan.worker-1", family), site.address("Node/milan/worker-1", family)
    word, target = ("ip", f"{walk.dial}:8080") if family == IPV4 else ("ip6", f"[{walk.dial}]:8080")
    rule = f"{word} daddr {address} tcp dport 30080 dnat to {target}"
    site.run("milan.worker-1", "nft", f"table inet node-ports {{ chain pre {{ type nat hook prerouting priority dstnat; {rule}; }}; }}")
    loop = asyncio.get_running_loop()
    try:
        with (
            opened("turin.pod.bank", family, socket.SOCK_STREAM, 8080) as server,
            opened("underlay", family, socket.SOCK_STREAM) as client,
            capture(f"{PREFIX}milan.worker-1", "eth0") as uplink,
        ):
            server.listen()
            async with asyncio.timeout(WAIT_S):
                await loop.sock_connect(client, (address, 30080))
                accepted, sender = await loop.sock_accept(server)
                with accepted:
                    await loop.sock_sendall(accepted, b"hello")
                    assert await loop.sock_recv(client, 16) == b"hello"
        assert sender[0] == walk.seen_source
        assert in_clear(site, uplink) == []
    finally:
        site.run("milan.worker-1", "nft", "delete", "table", "inet", "node-ports")


@pytest.mark.parametrize("sender", ["rome.pod.shop", "milan.pod.mint", "milan.worker-1"])
async def test_errors_come_back_to_who_sent(site: Site, family: Family, sender: str) -> None:
    """A pod or a node learns the tunnels' MTU from a gateway's error about a large packet, and from the far pod that nobody listens."""
    headers = 28 if family == IPV4 else 48
    level, discover, get_mtu = (
        (socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_MTU) if family == IPV4 else (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_MTU)
    )
    dial = walk_from(site, sender, family).dial
    # Of an address that it has not learned about before; nobody has it, but a gateway's error comes before that is found out.
    stranger = str(ipaddress.ip_address(dial) + next(STRANGERS))
    with opened(sender, family) as client:
        client.setsockopt(level, discover, PROBE)
        client.connect((stranger, 9))
        assert client.getsockopt(level, get_mtu) > TOO_LARGE_BYTES

        def is_told() -> bool:
            """Whether the socket knows the MTU; it sends again, since a host limits its errors."""
            with contextlib.suppress(OSError):
                client.send(bytes(TOO_LARGE_BYTES - headers))
            return client.getsockopt(level, get_mtu) == TUNNEL_MTU

        await until(is_told, "the error tells the MTU")
    with opened(sender, family) as client:
        client.connect((dial, 9))
        await until(lambda: is_refused(client), "it hears that nobody listens")


async def test_outer_packets_are_of_the_overlay_and_the_underlay_that_there_are(site: Site, overlay_and_sources: tuple[str, str]) -> None:
    """To its nodes milan's gateway speaks by IPv4 and rome's by IPv6, both by the overlay's port; and kernels hold what is planned."""
    port = OVERLAY_PORTS[overlay_and_sources[0]]
    with capture(f"{PREFIX}rome.gateway", "eth0") as at_rome, capture(f"{PREFIX}milan.to-rome", "eth0") as at_milan:
        await site.carries(lambda probe: (probe.client.name, probe.server.name) == ("rome/shop", "milan/mill"))
    for packets, family in ((at_rome, IPV6), (at_milan, IPV4)):
        outer = [packet for packet in packets if packet.destination_port in OVERLAY_PORTS.values()]
        assert {(packet.destination_port, Address(packet.destination).family) for packet in outer} == {(port, family)}
        assert {packet.outgoing for packet in outer} == {True, False}
        assert in_clear(site, packets) == []
    assert site.differences() == {}


async def spoken(client: socket.socket, server: socket.socket, dial: Address) -> tuple[str, int]:
    """Who speaks, as the server sees it, once it has asked and has been answered from where it asked."""
    address = (dial, server.getsockname()[1])
    client.sendto(b"hello", address)
    _, sender = await received(server)
    server.sendto(b"answer", sender)
    assert await received(client) == (b"answer", address)
    return sender


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.1)


def is_refused(client: socket.socket) -> bool:
    """Whether an ICMP error has said that nobody listens at the other end; asks again if not."""
    try:
        client.send(b"anybody?")
        client.recv(16)
    except ConnectionRefusedError:
        return True
    except BlockingIOError:
        return False
    return False


def walk_from(site: Site, place: str, family: Family) -> Walk:
    """How packets of a pod or a node reach a pod of the next cluster: milan's from rome, turin's from milan."""
    cluster, _, name = place.partition(".")
    server = site.object("Endpoint/milan/mill" if cluster == "rome" else "Endpoint/turin/bank")
    assert isinstance(server, Pod)
    if name.startswith("pod."):
        client = site.object(f"Endpoint/{cluster}/{name.removeprefix('pod.')}")
        assert isinstance(client, Pod)
        found = expected(site.topology, client, server, family)
    else:
        node = site.object(f"Node/{cluster}/{name}")
        assert isinstance(node, Node)
        found = from_node(site.topology, site.chosen, node, server, family)
    assert found is not None
    return found


def in_clear(site: Site, packets: list[Packet]) -> list[Packet]:
    """What leaves for an address that a peering or an external prefix gives, outside of all tunnels and overlays."""
    ends = [end for item in site.topology if isinstance(item, Peering) for end in item.ends]
    prefixes = [prefix for end in ends for prefix in (*end.remap_pods, *end.remap_external)]
    prefixes += [prefix for item in site.topology if isinstance(item, Cluster) for prefix in item.external_prefixes]
    return [packet for packet in packets if packet.outgoing and any(prefix.covers(Address(packet.destination)) for prefix in prefixes)]
