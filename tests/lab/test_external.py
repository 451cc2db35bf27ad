"""What is no pod's: traffic of nodes and NodePorts, and addresses that a cluster maps, over one peering and over two in a row."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from schemas.topology import IpMapping
from schemas.values import IPV4, IPV6, Address, Family, Name, Prefix
from tests.lab.conftest import EXAMPLES, Live, Mesh, Packet, connected, eventually, up
from tests.lab.test_fail_closed import stopped
from tests.speakers import opened, received

pytestmark = pytest.mark.privileged

BANK = {IPV4: "10.65.1.10", IPV6: "fd00:65:0:1::10"}
"""turin's pod as milan dials it."""
AT_TURIN = {IPV4: Prefix("10.68.0.0/16"), IPV6: Prefix("fd00:68::/48")}
"""milan's external prefixes as turin sees them."""
EXTERNAL = (Prefix("10.71.0.0/16"), Prefix("fd00:71::/48"))
REMOTE = tuple(Prefix(text) for number in (63, 64, 65, 66) for text in (f"10.{number}.0.0/16", f"fd00:{number}::/48"))
OUTSIDE = {IPV4: "192.0.2.50", IPV6: "2001:db8:99::50"}
GATEWAYS = ("rome.gateway", "milan.to-rome", "milan.to-turin", "turin.gateway")


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The lab of the three clusters, for the tests of this module."""
    with up(EXAMPLES / "three-clusters.yaml", tmp_path_factory.mktemp("row") / "state") as found:
        yield found


@pytest.fixture
async def three(row: Mesh) -> AsyncIterator[Live]:
    """The lab as the example says, connected to; given back the same."""
    async with connected(row) as found:
        yield found


@contextlib.contextmanager
def routes(mesh: Mesh, place: str, *lines: str) -> Iterator[None]:
    """Addresses and routes (``ip`` commands with add) that are there while the body runs."""
    added = []
    try:
        for line in lines:
            mesh.run(place, "ip", *line.split())
            added.append(line)
        yield
    finally:
        for line in reversed(added):
            mesh.run(place, "ip", *line.replace(" add ", " delete ").split())


async def say_sources(live: Live, kind: str) -> None:
    """Let milan's nodes send per node or shared."""
    await live.publish(replace(live.mesh.object("Cluster/milan/milan"), sources=kind))


def number(live: Live, node: str) -> int:
    """A node's number in milan."""
    return live.board.chosen.numbers["milan", node]


def clear(packets: list[Packet]) -> list[Packet]:
    """What left by an uplink for a remote cluster, or for an external address, unencrypted."""
    return [
        packet
        for packet in packets
        if packet.outgoing and any(prefix.covers(Address(packet.destination)) for prefix in (*REMOTE, *EXTERNAL))
    ]


# Everything at once --------------------------------------------------------------------------------------------------------------------


async def test_all_that_the_topology_joins(three: Live) -> None:
    """Every pair of pods, every node to each peer, every mapping from each peer that is not its own owner; in both families."""
    pods, others = await three.carries(), await three.crosses()
    between = {frozenset(name.split("/")[0] for name in check.name.split(" ", 1)[1].split(" → ")) for check in pods}
    assert between == {frozenset(pair) for pair in (("rome", "milan"), ("milan", "turin"), ("milan",))}
    assert all(check.ok for check in others)
    nodes, mapped = (sorted(check.name for check in others if word in check.name) for word in ("/node/", "/mapping/"))
    # rome's and turin's node to milan, milan's two to both; by two protocols in two families.
    assert len(nodes) == (1 + 1 + 2 * 2) * 2 * 2
    # Of another cluster's for the one that is not it, of milan's own for both; six of each family but the pod, which has IPv4 only.
    assert len(mapped) == (2 * 1 + 2 * 1 + 1 * 2 + 2 * 2) * 2
    assert {check.name for check in others if "rome/shop → milan/mapping/rome-shop" in check.name} == set()


async def test_what_is_mapped_never_goes_back_into_the_tunnel(three: Live) -> None:
    """A packet from rome for what milan maps leaves milan's gateway by the overlay only, and its outer packets by the uplink."""
    with contextlib.ExitStack() as stack:
        client, server = (stack.enter_context(opened(pod)) for pod in ("rome.pod.shop", "turin.pod.bank"))
        links = ("mt.0", "mt.1", "eth0")
        first, second, uplink = (stack.enter_context(three.mesh.capture("milan.to-rome", link)) for link in links)
        for _ in range(5):
            client.sendto(b"hello", ("10.62.200.10", server.getsockname()[1]))
            data, sender = await received(server)
            server.sendto(data, sender)
            await received(client)
    tunnels = [packet for packet in (*first, *second) if packet.protocol == socket.IPPROTO_UDP and packet.body[8:13] == b"hello"]
    assert sum(not packet.outgoing for packet in tunnels) == sum(packet.outgoing for packet in tunnels) == 5
    assert {packet.destination for packet in tunnels if packet.outgoing} == {"10.200.1.10"}
    assert [packet for packet in uplink if packet.body[8:13] == b"hello"] == []


# Sources -------------------------------------------------------------------------------------------------------------------------------


async def test_sources_change_while_pods_speak(three: Live) -> None:
    """From per node to shared and back: flows of pods lose nothing, a running flow of a node goes on, and each time all probes pass."""
    pairs = (("rome/shop", "milan/mill"), ("milan/mint", "turin/bank"), ("turin/bank", "milan/mill"))
    with opened("milan.worker-1", port=40333) as client, opened("turin.pod.bank") as server:
        for kind in ("per-node", "shared", "per-node"):
            async with three.undisturbed(*pairs):
                await say_sources(three, kind)
            client.sendto(b"on", (BANK[IPV4], server.getsockname()[1]))
            data, sender = await received(server)
            assert sender[0] == AT_TURIN[IPV4].address(number(three, "worker-1") if kind == "per-node" else 0)
            server.sendto(data, sender)
            assert (await received(client))[0] == b"on"
            await three.carries()


async def test_an_old_flow_of_a_node_is_translated_once_there_is_a_peering(three: Live) -> None:
    """A node talked to the address before anybody led there: the same socket gets through when the peering is there."""
    peering = three.mesh.object("Peering/milan/milan-turin")
    await three.delete(peering)
    with opened("milan.worker-2", port=40555, address="172.18.1.12") as client, opened("turin.pod.bank") as server:
        address = (BANK[IPV4], server.getsockname()[1])
        client.sendto(b"early", address)
        assert "10.65.1.10" in three.mesh.run("milan.worker-2", "conntrack", "-L", "-p", "udp", "--sport", "40555")
        await three.publish(peering)
        await three.carries()
        client.sendto(b"late", address)
        data, sender = await received(server)
        assert (data, sender[0]) == (b"late", AT_TURIN[IPV4].address(number(three, "worker-2")))
        server.sendto(b"answer", sender)
        assert await received(client) == (b"answer", address)


async def test_gateways_may_forget_a_nodes_flows(three: Live) -> None:
    """Addresses of the nodes' own need no memory: after both gateways forgot all connections, either side may speak first."""
    with opened("milan.worker-1", port=40444) as client, opened("turin.pod.bank") as server:
        address = (BANK[IPV4], server.getsockname()[1])
        client.sendto(b"first", address)
        _, sender = await received(server)
        for first in ("server", "client"):
            for host in ("milan.to-turin", "turin.gateway"):
                three.mesh.run(host, "conntrack", "-F")
            if first == "server":
                server.sendto(b"late", sender)
                assert await received(client) == (b"late", address)
            client.sendto(b"again", address)
            assert await received(server) == (b"again", sender)
            server.sendto(b"answer", sender)
            assert await received(client) == (b"answer", address)


@pytest.mark.parametrize("flush", [False, True], ids=["with nftables", "after a flush"])
async def test_an_answer_to_a_forgotten_flow_leaves_no_node(three: Live, flush: bool) -> None:
    """The node alone remembers who asked. When it does not, the answer ends there, with its guard as without nftables."""
    mesh = three.mesh
    for family in (IPV4, IPV6):
        with opened("milan.worker-1", family) as client, opened("turin.pod.bank", family) as server:
            client.sendto(b"first", (BANK[family], server.getsockname()[1]))
            _, sender = await received(server)
            with mesh.capture("milan.worker-1") as uplink, mesh.capture("milan.worker-1", "mo.to-turin") as overlay:
                if flush:
                    foreign = mesh.run("milan.worker-1", "nft", "list", "table", "ip", "lab-cni")
                    with stopped(mesh, ["milan.worker-1"]):
                        mesh.run("milan.worker-1", "nft", "flush", "ruleset")
                        mesh.run("milan.worker-1", "conntrack", "-F")
                        await answer_late(server, sender, overlay)
                    mesh.run("milan.worker-1", "nft", foreign)
                    await three.settled()
                else:
                    mesh.run("milan.worker-1", "conntrack", "-F")
                    await answer_late(server, sender, overlay)
            assert clear(uplink) == []
    await three.carries()


async def answer_late(server: socket.socket, sender: tuple[str, int], overlay: list[Packet]) -> None:
    """Answer, and wait until the node got it from its gateway."""
    before = sum(not packet.outgoing for packet in overlay)
    server.sendto(b"late", sender)
    await eventually(lambda: sum(not packet.outgoing for packet in overlay) > before, "the answer reaches the node", timeout_s=5)
    await asyncio.sleep(0.3)  # it leaves within this time if it leaves at all


async def test_overlay_addresses_are_not_reached_from_a_tunnel(three: Live) -> None:
    """Whoever holds the far end sends into the tunnel what it likes: an overlay address of a node is none of its business."""
    mesh = three.mesh
    target = Prefix("10.81.0.0/16").address(number(three, "worker-1"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(routes(mesh, "turin.gateway", f"route add {target} dev mt.0"))
        client = stack.enter_context(opened("turin.gateway"))
        tunnel = stack.enter_context(mesh.capture("milan.to-turin", "mt.0"))
        overlay = stack.enter_context(mesh.capture("milan.worker-1", "mo.to-turin"))
        client.sendto(b"hello", (target, 9))
        await eventually(lambda: any(packet.destination == target for packet in tunnel), "it comes out of the tunnel", timeout_s=5)
        await asyncio.sleep(0.3)  # it arrives within this time if it arrives at all
    assert [packet for packet in overlay if packet.destination == target and packet.body[8:] == b"hello"] == []


# Mappings ------------------------------------------------------------------------------------------------------------------------------


def mapping(family: Family, **changes: object) -> IpMapping:
    """Of the address outside, led by milan's second node."""
    fields = {
        "name": Name(f"outside-{family}"),
        "cluster": Name("milan"),
        "real": Address(OUTSIDE[family]),
        "node": Name("worker-2"),
        **changes,
    }
    return IpMapping(**fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def outsiders(mesh: Mesh) -> Iterator[None]:
    """The address outside, in both families: in the underlay's router, which is every host's way to everywhere."""
    with routes(mesh, "underlay", *(f"address add {Address(address).host_prefix} dev br0" for address in OUTSIDE.values())):
        yield


async def dialled(live: Live, family: Family, item: IpMapping) -> tuple[str, str]:
    """What rome's pod and the address outside see of each other when the pod asks and gets an answer: the sender there, and here."""
    external = live.board.chosen.external(item)
    seen = {IPV4: Prefix("10.62.0.0/16"), IPV6: Prefix("fd00:62::/48")}[family]
    real = next(prefix for prefix in EXTERNAL if prefix.covers(external))
    with opened("rome.pod.shop", family) as client, opened("underlay", family, address=OUTSIDE[family]) as server:
        client.sendto(b"hello", (real.translate(external, seen), server.getsockname()[1]))
        data, sender = await received(server)
        server.sendto(data, sender)
        answer = await received(client)
    return sender[0], answer[1][0]


@pytest.mark.parametrize("family,uplink", [(IPV4, "172.18.1.12"), (IPV6, "2001:db8:18:1::12")])
async def test_an_outsider_answers_the_node_that_masquerades(three: Live, family: Family, uplink: str) -> None:
    """An address outside that knows nothing of rome: it sees the leading node; a toggle of masquerade leaves nothing behind."""
    mesh, item = three.mesh, mapping(family, masquerade=True)
    before = {host: mesh.own_state(host) for host in mesh.hosts}
    with outsiders(mesh):
        await three.publish(item)
        assert (await dialled(three, family, item))[0] == uplink
        with_masquerade = {host: mesh.own_state(host) for host in mesh.hosts}
        await three.publish(replace(item, masquerade=False))
        assert any("masqueraded" in table and OUTSIDE[family] in table for table in with_masquerade["milan.worker-2"])
        await three.publish(item)
        assert {host: mesh.own_state(host) for host in mesh.hosts} == with_masquerade
        await three.delete(item)
    assert {host: mesh.own_state(host) for host in mesh.hosts} == before


@pytest.mark.parametrize("family,via", [(IPV4, "172.18.1.12"), (IPV6, "2001:db8:18:1::12")])
async def test_an_outsider_that_knows_the_way_speaks_as_its_external_address(three: Live, family: Family, via: str) -> None:
    """It sees rome's pod as milan does; what it starts by the leading node comes from the address that rome dials."""
    mesh, item = three.mesh, mapping(family, external=Address("10.71.99.4" if family == IPV4 else "fd00:71:0:9::4"))
    seen, pod = {IPV4: ("10.62.99.4", "10.63.1.10"), IPV6: ("fd00:62:0:9::4", "fd00:63:0:1::10")}[family]
    remote = {IPV4: "10.63.0.0/16", IPV6: "fd00:63::/48"}[family]
    with outsiders(mesh), routes(mesh, "underlay", f"-{family} route add {remote} via {via} dev br0 onlink src {OUTSIDE[family]}"):
        await three.publish(item)
        assert await dialled(three, family, item) == (pod, seen)
        with opened("underlay", family) as client, opened("rome.pod.shop", family) as server:
            client.sendto(b"hello", (pod, server.getsockname()[1]))
            data, sender = await received(server)
            assert sender[0] == seen
            server.sendto(data, sender)
            assert (await received(client))[0] == b"hello"
        for host in GATEWAYS[:2]:
            mesh.run(host, "conntrack", "-F")
        assert await dialled(three, family, item) == (pod, seen)
        await three.delete(item)


async def test_a_mapping_that_goes_takes_its_flows_along(three: Live) -> None:
    """A running flow to a mapped pod ends with the mapping, and begins again with it; flows of pods lose nothing meanwhile."""
    item = three.mesh.object("IpMapping/milan/mint")
    with opened("rome.pod.shop") as client, opened("milan.pod.mint") as server:
        address = ("10.62.200.20", server.getsockname()[1])
        async with three.undisturbed(("rome/shop", "milan/mint"), ("milan/mill", "turin/bank")):
            for there in (True, False, True):
                if not there:
                    await three.delete(item)
                elif item.ref not in three.objects:
                    await three.publish(item)
                client.sendto(b"hello", address)
                if there:
                    assert (await received(server))[1][0] == "10.63.1.10"
                else:
                    with pytest.raises(TimeoutError):
                        await received(server)


async def test_a_node_that_leads_may_go(three: Live) -> None:
    """Where the node that was chosen leaves, another one leads: rome still reaches turin's pod through milan."""
    await three.carries()
    node, pod = (three.mesh.object(ref) for ref in ("Node/milan/worker-2", "Endpoint/milan/mint"))
    mapped = three.mesh.object("IpMapping/milan/mint")
    await three.delete(mapped, pod, node)
    await three.carries()
    checks = [check for check in await three.crosses() if "mapping/turin-bank" in check.name]
    assert len(checks) == 4
    assert all(check.ok for check in checks)
