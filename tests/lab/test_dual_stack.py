"""Both families at once: a lab of the dual-stack example, looked at for what IPv6 does otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from schemas.topology import Gateway, Node
from schemas.values import IPV4, IPV6, Address, Family, Prefix
from tests.lab.conftest import EXAMPLES, Live, Mesh, Packet, connected, eventually, up
from tests.lab.test_data_path import captures, pod_socket, syn_mss, too_large
from tests.lab.test_fail_closed import stopped
from tests.lab.test_plans import printed_is_held, scratch
from tests.lab.test_tunnel_loss import GATEWAYS, blocked, flows_move_and_others_stay, withdrawn

pytestmark = pytest.mark.privileged

EXAMPLE = EXAMPLES / "dual-stack.yaml"
TUNNELS = ("mt.0", "mt.1")
ANY_POD = (Prefix("fd00:200::/48"), *(Prefix(f"fd00:{number}::/48") for number in (61, 62, 63, 64)))
PORT = 9
__all__ = ["scratch"]


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The lab of the dual-stack example, for the tests of this module."""
    with up(EXAMPLE, tmp_path_factory.mktemp("dual") / "state") as found:
        yield found


@pytest.fixture
async def both(dual: Mesh) -> AsyncIterator[Live]:
    """The lab as the example says, connected to; given back the same."""
    async with connected(dual) as found:
        yield found


async def test_every_pod_reaches_every_other_in_both_families(both: Live) -> None:
    """12 ordered pairs by UDP and TCP in both families, less the two whose nodes have no IPv4 way to each other; nothing was dropped."""
    checks = await both.carries()
    assert len(checks) == 12 * 2 * 2 - 2 * 2
    assert sum("6 " in check.name for check in checks) == 12 * 2
    to_bank = {check.detail for check in checks if check.name == "udp6 rome/shop → milan/bank"}
    assert to_bank == {"dialled fd00:61:0:1::10, server saw fd00:63:0:1::10 → fd00:200:0:1::10"}


async def test_neighbours_find_each_other_on_overlay_links(both: Live) -> None:
    """Solicitations pass the checks of sources: after both sides forgot each other, pods speak again and nothing is counted as dropped."""
    await both.carries()
    before = {host: dropped(both.mesh, host) for host in both.mesh.hosts}
    for host in both.mesh.hosts:
        links = [link["ifname"] for link in json.loads(both.mesh.run(host, "ip", "-j", "link")) if link["ifname"].startswith("mo.")]
        for link in links:
            both.mesh.run(host, "ip", "-6", "neigh", "flush", "dev", link)
    await both.carries()
    assert {host: dropped(both.mesh, host) for host in both.mesh.hosts} == before


def dropped(mesh: Mesh, host: str) -> list[str]:
    """Counts of all rules that drop, in order."""
    text = mesh.run(host, "nft", "list", "table", "inet", "meshmark.rome.rome-milan")
    return [line.split("counter packets ")[1].split()[0] for line in text.splitlines() if "counter packets" in line]


async def test_an_overlay_link_is_of_use_at_once(both: Live) -> None:
    """Every address that is ours is neither tentative nor to be looked for twice; the first packet after a link is made is answered."""
    for host in both.mesh.hosts:
        for link in json.loads(both.mesh.run(host, "ip", "-6", "-j", "address")):
            own = [entry for entry in link["addr_info"] if link["ifname"].startswith(("mo.", "mt.")) and is_ours(entry["local"])]
            assert all(entry.get("nodad") and not entry.get("tentative") for entry in own), (host, link["ifname"])
            assert own or not link["ifname"].startswith("mo."), (host, link["ifname"])


def is_ours(address: str) -> bool:
    return address in ("fe80::1", "fe80::2") or not address.startswith("fe80:")


async def test_ipv6_flows_spread_over_the_tunnels(both: Live) -> None:
    """160 flows use both tunnels, each flow one of them in each direction, the same again when its datagrams come again."""
    walk = both.walk("rome/shop", "milan/bank", IPV6)
    with (
        pod_socket("milan/bank", family=IPV6) as server,
        captures(both, "rome.gateway", TUNNELS) as packets,
        contextlib.ExitStack() as stack,
    ):
        server.bind(("::", 0))
        flows = [stack.enter_context(pod_socket("rome/shop", family=IPV6)) for _ in range(160)]
        for _ in range(3):
            for flow in flows:
                flow.sendto(b"x", (walk.dial, server.getsockname()[1]))
                await asyncio.sleep(0.001)
        await eventually(
            lambda: sum(packet.protocol == socket.IPPROTO_UDP for found in packets.values() for packet in found) >= 3 * len(flows),
            "all datagrams pass the tunnels",
        )
    used: dict[int, set[str]] = {}
    for link, found in packets.items():
        for packet in found:
            if packet.outgoing and packet.protocol == socket.IPPROTO_UDP:
                used.setdefault(packet.source_port, set()).add(link)
    assert len(used) == 160
    assert all(len(links) == 1 for links in used.values()), "a flow changed its tunnel"
    share = Counter(link for links in used.values() for link in links)
    # 80 each are expected; a fair choice strays by more than 40 once in a thousand million.
    assert all(40 < share[link] < 120 for link in TUNNELS), share


@pytest.mark.parametrize("family,headers", [(IPV4, 40), (IPV6, 60)])
@pytest.mark.parametrize("client,server", [("rome/shop", "milan/bank"), ("milan/post", "rome/stock")])
async def test_segments_fit_the_tunnel(both: Live, client: str, server: str, family: Family, headers: int) -> None:
    """The MSS at both ends is at most what the tunnel takes, and exactly that where no overlay link is narrower."""
    walk = both.walk(client, server, family)
    near, far = (name.replace("/", ".pod.") for name in (client, server))
    with both.mesh.capture(near) as at_client, both.mesh.capture(far) as at_server:
        with pod_socket(server, socket.SOCK_STREAM, family) as listener, pod_socket(client, socket.SOCK_STREAM, family) as caller:
            listener.bind(("", 0))
            listener.listen()
            port = listener.getsockname()[1]
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(caller, (walk.dial, port)), 10)
        await eventually(lambda: any(syn_mss(packet) for packet in at_client if not packet.outgoing), "the answer was seen")
    sizes = {syn_mss(packet) for packet in (*at_client, *at_server) if not packet.outgoing and syn_mss(packet)}
    assert sizes == {1440 - headers} if client == "rome/shop" else max(sizes) <= 1440 - headers


@pytest.mark.parametrize("family,headers", [(IPV4, 28), (IPV6, 48)])
async def test_too_large_packets_get_an_answer_through_both_translations(both: Live, family: Family, headers: int) -> None:
    """A datagram that fits the overlay and not the tunnel comes back as an error with the tunnel's MTU, about the packet as it was sent."""
    walk = both.walk("rome/shop", "milan/bank", family)
    with both.mesh.capture("rome.pod.shop") as packets, pod_socket("rome/shop", family=family) as flow:
        if family == IPV6:
            flow.setsockopt(socket.IPPROTO_IPV6, 23, 2)  # IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO
            flow.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_DONTFRAG, 1)
        else:
            flow.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
        with contextlib.suppress(OSError):
            flow.sendto(bytes(1450 - headers), (walk.dial, 9))
        error = too_big if family == IPV6 else too_large
        await eventually(lambda: any(error(packet) for packet in packets), "the error comes back")
    [(mtu, about)] = {(error(packet), about_destination(packet)) for packet in packets if error(packet)}
    assert (mtu, about) == (1440, walk.dial)


def too_big(packet: Packet) -> int:
    """The MTU in an ICMPv6 `packet too big`, 0 for any other packet."""
    if packet.outgoing or packet.protocol != socket.IPPROTO_ICMPV6 or tuple(packet.body[:2]) != (2, 0):
        return 0
    return int.from_bytes(packet.body[4:8], "big")


def about_destination(packet: Packet) -> Address:
    """Where the packet went that an ICMP error is about."""
    inner = packet.body[8:]
    return Address.of(inner[24:40] if inner[0] >> 4 == 6 else inner[16:20])


TAKEN_AWAY = {
    "rule inet6 900 fwmark 0xff00/0xff00 iif - to -": "ip -6 rule delete pref 900",
    "route 7002 fd00:200:0:1::/64 1024": "ip route delete fd00:200:0:1::/64 table 7002",
    "route 7001 fd00:200::/48 1024": "ip route delete fd00:200::/48 table 7001 via fd6d:6573:6812::2 dev mt.0",
    "element meshmark.rome.rome-milan to_real6 fd00:61::/48": "nft delete element inet meshmark.rome.rome-milan to_real6 { fd00:61::/48 }",
}


@pytest.mark.parametrize("key", TAKEN_AWAY)
async def test_what_a_hand_takes_away_comes_back(both: Live, key: str) -> None:
    """An IPv6 route, a next hop of one, a rule and an element: each is raised as drift of that very object, and repaired."""
    before = both.mesh.own_state("rome.gateway")
    first = len(both.board.drift)

    def told() -> list[str]:
        return [event.state for event in both.board.drift[first:] if (event.cluster, event.host, event.key) == ("rome", "gateway", key)]

    both.mesh.run("rome.gateway", *TAKEN_AWAY[key].split(" ", 6 if "element" in key else -1))
    await eventually(lambda: told() == ["raised", "resolved"], "it is raised and resolved", lambda: both.board.drift[first:])
    assert both.mesh.own_state("rome.gateway") == before


@pytest.mark.parametrize("link", ["mo.worker-1", "mt.0"])
async def test_a_link_that_went_down_gets_its_addresses_back(both: Live, link: str) -> None:
    """The kernel takes IPv6 addresses and routes off a link that goes down, and gives none back when it comes up; we do."""
    mesh, host = both.mesh, "rome.gateway"

    def held() -> object:
        entries = json.loads(mesh.run(host, "ip", "-j", "address", "show", "dev", link))[0]["addr_info"]
        return sorted(entry["local"] for entry in entries if is_ours(entry["local"])), mesh.own_state(host)

    before = held()
    mesh.run(host, "ip", "link", "set", link, "down")
    mesh.run(host, "ip", "link", "set", link, "up")
    await eventually(lambda: held() == before, "all is as it was", held)
    await both.carries()


@pytest.mark.parametrize("missing", ["tables", "rules", "tables and rules"])
async def test_nothing_leaves_in_clear_when_what_translates_is_gone(both: Live, missing: str) -> None:
    """Without our tables, without our policy rules, or without either, on every host: no IPv6 packet of a pod leaves by an uplink."""
    mesh = both.mesh
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopped(mesh, mesh.hosts))
        packets = {host: stack.enter_context(mesh.capture(host)) for host in mesh.hosts}
        for host in mesh.hosts:
            if "tables" in missing:
                mesh.run(host, "nft", "delete", "table", "inet", "meshmark.rome.rome-milan")
            if "rules" in missing:
                mesh.run(host, "sh", "-c", "while ip -6 rule del proto 77 2>/dev/null || ip -6 rule del pref 900 2>/dev/null; do :; done")
        for client in ("rome/shop", "rome/stock", "milan/bank", "milan/post"):
            far = ("milan/bank", "milan/post") if client.startswith("rome") else ("rome/shop", "rome/stock")
            with pod_socket(client, family=IPV6) as flow:
                for server in far * 5:
                    with contextlib.suppress(OSError):
                        flow.sendto(b"leak?", (both.walk(client, server, IPV6).dial, PORT))
        # What was sent has gone its way, or has waited for a neighbour in vain, well within this time.
        await asyncio.sleep(1.5)
    leaked = [
        (host, packet.source, packet.destination)
        for host, found in packets.items()
        for packet in found
        if packet.outgoing and packet.destination_port == PORT and any(prefix.covers(packet.destination) for prefix in ANY_POD)
    ]
    assert leaked == []
    await both.carries()


async def test_what_is_printed_offline_is_what_the_lab_holds(both: Live, scratch: str) -> None:
    """In both families, host by host, and the command finds no difference."""
    await printed_is_held(both.mesh, both, EXAMPLE, scratch)
    assert (await both.meshmark("plan", "--diff")).returncode == 0


async def test_a_dead_tunnel_leaves_the_routes_of_both_families(both: Live) -> None:
    """Cut, it is in no route of either gateway; pods reach each other in both families; uncut, all is as before, without drift."""
    mesh = both.mesh
    before = {host: mesh.own_state(host) for host in GATEWAYS}
    told = len(both.board.drift)
    with blocked(mesh, 1):
        await eventually(lambda: set(map(tuple, withdrawn(both).values())) == {("mt.1",)}, "both ends report it withdrawn")
        for host in GATEWAYS:
            for family in ("-4", "-6"):
                routes = mesh.run(host, "ip", family, "route", "show", "table", "7001")
                assert routes.count("mt.1") == 1, "its own network's route is left"
                assert routes.count("mt.0") > 1
        await both.carries()
    await eventually(lambda: not any(withdrawn(both).values()), "it is back", timeout_s=90)
    assert {host: mesh.own_state(host) for host in GATEWAYS} == before
    assert [(event.host, event.key, event.state) for event in both.board.drift[told:]] == []


async def test_ipv6_flows_of_a_dead_tunnel_move_and_the_others_stay(both: Live) -> None:
    """One tunnel of three is cut: as with IPv4 its flows are back within the time of detection, no other flow loses a datagram or moves."""
    await both.publish(replace(both.mesh.object("Peering/rome/rome-milan"), tunnels=3))
    await both.carries()
    await flows_move_and_others_stay(both, IPV6)


async def test_a_cluster_moves_to_an_underlay_of_ipv6_alone(both: Live) -> None:
    """Every overlay link of milan and every tunnel is made again over IPv6, and all pods reach each other in both families as before."""
    hosts = [item for item in both.mesh.topology if isinstance(item, Node | Gateway) and item.cluster == "milan"]
    only6 = [replace(item, addresses=tuple(address for address in item.addresses if address.family == IPV6)) for item in hosts]
    await both.publish(*sorted(only6, key=lambda item: isinstance(item, Gateway)))
    checks = await both.carries()
    assert any(check.name.startswith("udp rome") for check in checks)
    with both.mesh.capture("underlay", "br0") as packets:
        await both.carries()
    outer = {
        packet.destination_port
        for packet in packets
        if packet.protocol == socket.IPPROTO_UDP and packet.source.startswith("2001:db8:18:1:")
    }
    assert outer & {51840, 51841}
    assert 4789 in outer
    assert not [packet for packet in packets if packet.source.startswith("172.18.1.") or packet.destination.startswith("172.18.1.")]
