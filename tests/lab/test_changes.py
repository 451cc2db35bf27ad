"""Changes of the topology under traffic, on the real kernel: what a change does not concern loses not one datagram, what it adds is
reached, and what it removes leaves nothing behind."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, Gateway, Node, Peering, PeeringEnd, Pod
from schemas.values import Address, Name, Prefix

pytestmark = pytest.mark.privileged

PEERING = "Peering/rome/rome-milan"
ACROSS = (("rome/shop", "milan/bank"), ("milan/post", "rome/stock"))
WITHIN = (("rome/shop", "rome/stock"), ("milan/bank", "milan/post"))
PROBES = 24


def remapped(peering: Peering, place: int, **changes: object) -> Peering:
    ends = list(peering.ends)
    ends[place] = replace(ends[place], **changes)
    return replace(peering, ends=tuple(ends))


def hops(mesh, gateway: str) -> int:
    """Over how many tunnels a gateway spreads what it sends to the far pods."""
    routes = [line for line in mesh.run(gateway, "ip", "route", "list", "10.200.0.0/16", "table", "7001").splitlines() if "mt." in line]
    return len(routes)


async def test_a_tunnel_comes_and_goes_without_a_loss(mesh, live):
    """From 3 tunnels to 4 and back to 3, running flows in both directions lose nothing, and no policy rule is added."""
    rules = mesh.run("rome.gateway", "ip", "rule")
    peering = mesh.object(PEERING)
    async with live.undisturbed(*ACROSS, *WITHIN):
        await live.publish(replace(peering, tunnels=4))
        assert hops(mesh, "rome.gateway") == hops(mesh, "milan.gateway") == 4
        assert mesh.run("rome.gateway", "ip", "rule") == rules
        assert len(await live.carries()) == PROBES
        await live.publish(peering)
        assert hops(mesh, "rome.gateway") == hops(mesh, "milan.gateway") == 3
        assert "mt.3" not in mesh.run("rome.gateway", "ip", "link")
        assert "mt.3" not in mesh.run("milan.gateway", "ip", "link")
    assert len(await live.carries()) == PROBES


async def test_a_node_with_a_pod_joins_and_leaves_without_a_loss(mesh, live):
    """A new node's pod is reached from everywhere; when both go, the other hosts hold what they held before."""
    before = {host: mesh.own_state(host) for host in mesh.hosts}
    node = Node(name=Name("worker-3"), cluster=Name("rome"), addresses=(Address("172.18.0.13"),), pod_prefixes=(Prefix("10.200.3.0/24"),))
    pod = Pod(name=Name("till"), cluster=Name("rome"), node=node.name, addresses=(Address("10.200.3.10"),))
    async with live.undisturbed(*ACROSS, *WITHIN):
        await live.publish(node, pod)
        checks = await live.carries()
        assert sum("rome/till" in check.name for check in checks) == 16
        assert len(checks) == PROBES + 16
        await live.delete(pod, node)
        assert len(await live.carries()) == PROBES
    assert {host: mesh.own_state(host) for host in mesh.hosts} == before


@pytest.mark.parametrize("address", ["10.200.1.11", "10.200.77.7"], ids=["inside", "outside"])
async def test_a_pod_joins_and_leaves_without_a_loss(mesh, live, address: str):
    """A new pod is reached from everywhere, whether its address lies in its node's prefix or needs a route of its own."""
    before = mesh.own_state("milan.gateway")
    pod = Pod(name=Name("kiosk"), cluster=Name("milan"), node=Name("worker-1"), addresses=(Address(address),))
    async with live.undisturbed(*ACROSS, *WITHIN):
        await live.publish(pod)
        checks = await live.carries()
        assert sum("milan/kiosk" in check.name for check in checks) == 16
        await live.delete(pod)
    assert mesh.own_state("milan.gateway") == before


async def test_another_external_remap_concerns_no_flow_between_pods(mesh, live):
    """Changing how one end sees the other's external addresses leaves all flows between pods alone."""
    peering = mesh.object(PEERING)
    async with live.undisturbed(*ACROSS, *WITHIN):
        await live.publish(remapped(peering, 0, remap_external=(Prefix("10.66.0.0/16"),)))
        for host in ("rome.gateway", "rome.worker-1"):
            state = "\n".join(mesh.own_state(host))
            assert "10.66.0.0/16" in state
            assert "10.62.0.0/16" not in state
        assert len(await live.carries()) == PROBES
        await live.publish(peering)
    assert len(await live.carries()) == PROBES


async def test_another_pod_remap_of_one_end_moves_all_pods(mesh, live):
    """When rome sees milan's pods elsewhere, all pods reach each other by the new addresses, none by the old; flows within a cluster lose
    nothing."""
    peering = mesh.object(PEERING)
    async with live.undisturbed(*WITHIN):
        await live.publish(remapped(peering, 0, remap_pods=(Prefix("10.65.0.0/16"),)))
        checks = await live.carries()
        assert len(checks) == PROBES
        assert sum("dialled 10.65." in check.detail for check in checks) == 8
        assert sum("server saw 10.65." in check.detail for check in checks) == 8
        for host in mesh.hosts:
            assert "10.61.0.0/16" not in "\n".join(mesh.own_state(host))
        # New flows by the new addresses run as the old ones did.
        async with live.undisturbed(*ACROSS):
            pass
        await live.publish(peering)
    assert len(await live.carries()) == PROBES


async def test_a_pod_roams_to_another_node(mesh, live):
    """A pod that is published with another node is reached there from everywhere; flows of other pods lose nothing."""
    pod = mesh.object("Endpoint/rome/shop")
    before = mesh.own_state("rome.gateway")
    async with live.undisturbed(("rome/stock", "milan/bank"), ("milan/post", "rome/stock"), ("milan/bank", "milan/post")):
        await live.publish(replace(pod, node=Name("worker-2")))
        checks = await live.carries()
        assert len(checks) == PROBES
        assert "10.200.1.10 via" in mesh.run("rome.gateway", "ip", "route", "show", "table", "7002")
        await live.publish(pod)
        assert len(await live.carries()) == PROBES
    assert mesh.own_state("rome.gateway") == before


# Removing a peering ------------------------------------------------------------------------------------------------------------------

FOREIGN_NFT = """
table ip foreign {
    set known {
        type ipv4_addr
        elements = { 192.0.2.1, 192.0.2.2 }
    }
    chain forward {
        type filter hook forward priority filter + 5; policy accept;
        ip saddr @known meta mark set meta mark and 0xffffff00 or 0x77
        iifname "eth9" drop
    }
}
table inet meshmarked {
    chain postrouting {
        type nat hook postrouting priority srcnat; policy accept;
        ip daddr 192.0.2.0/24 oifname "eth9" masquerade
    }
}
"""
FOREIGN_IP = """
rule add priority 500 to 192.0.2.0/24 lookup 100
rule add priority 899 from 192.0.2.7 lookup 100
rule add priority 902 fwmark 0x34/0xff lookup 7003 protocol static
route add 192.0.2.0/24 dev eth0 scope link
route add unreachable 10.45.0.0/16 metric 4278198272 protocol static
route add 10.46.0.0/16 via 169.254.1.1 dev eth0 onlink metric 77 protocol bird
route add default via 169.254.1.1 dev eth0 onlink table 100 protocol static
route add 198.51.100.0/24 via 169.254.1.1 dev eth0 onlink table 7003 protocol static
"""
MEETING_IP = """
rule {verb} priority 900 from 192.0.2.7 lookup 100
rule {verb} priority 901 fwmark 0x1234 lookup 7002 protocol static
route {verb} 198.51.100.0/24 via 169.254.1.1 dev eth0 onlink table 7001 protocol static
route {verb} 198.51.100.0/24 via 169.254.1.1 dev eth0 onlink table 7010 protocol static
"""
"""Numbers of a peering's own: with these there it would not come in."""
SITES = ("oslo", "turin")


def sites() -> list:
    """Two more clusters whose pods have the addresses of all others, with a node, a gateway and a pod each; and no peering."""
    found: list = []
    for number, name in enumerate(map(Name, SITES), start=2):
        external, internal = Prefix(f"10.{70 + number}.0.0/16"), Prefix(f"10.{80 + number}.0.0/16")
        node = Node(name=Name("worker"), cluster=name, addresses=(Address(f"172.18.{number}.11"),), pod_prefixes=(Prefix("10.200.1.0/24"),))
        found += [
            Cluster(name=name, pod_prefixes=(Prefix("10.200.0.0/16"),), external_prefixes=(external,), internal_prefixes=(internal,)),
            Gateway(name=Name("edge"), cluster=name, addresses=(Address(f"172.18.{number}.10"),)),
            node,
            Pod(name=Name("desk"), cluster=name, node=node.name, addresses=(Address("10.200.1.10"),)),
        ]
    return found


def joined() -> Peering:
    ends = [
        PeeringEnd(
            cluster=Name(name),
            gateway=Name("edge"),
            remap_pods=(Prefix(f"10.{first}.0.0/16"),),
            remap_external=(Prefix(f"10.{first + 1}.0.0/16"),),
        )
        for name, first in zip(SITES, (41, 43), strict=True)
    ]
    return Peering(name=Name("oslo-turin"), cluster=Name("oslo"), ends=tuple(ends), tunnels=2)


def by_ip(mesh, host: str, lines: str) -> None:
    for line in lines.strip().splitlines():
        mesh.run(host, "ip", *line.split())


def put_foreign(mesh, host: str) -> None:
    """What other programs of a host keep in its kernel, close to where meshmark works; and sysctls that are not meshmark's choice."""
    mesh.run(host, "nft", FOREIGN_NFT)
    by_ip(mesh, host, FOREIGN_IP)
    forwarding = "net.ipv4.conf.eth0.forwarding=1"  # on a host that does not forward as a whole: turning that on and off resets it
    mesh.run(host, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=2", "net.ipv4.fib_multipath_hash_policy=1", forwarding)


def foreign(mesh, host: str) -> list[str]:
    """What is not meshmark's, as the kernel lists it."""
    rules = [line for line in mesh.run(host, "ip", "rule").splitlines() if "proto 77" not in line]
    routes = mesh.run(host, "ip", "-details", "route", "show", "table", "all").replace("\n\t", " ").splitlines()
    known = [line for line in routes if "proto 77" not in line and " mo." not in line and " mt." not in line]
    tables = [mesh.run(host, "nft", "list", "table", *name) for name in (("ip", "foreign"), ("inet", "meshmarked"))]
    return [*tables, *rules, *known]


async def test_a_removed_peering_leaves_hosts_as_they_were(mesh, live):
    """Two sites are joined, parted, joined again. Parted, each of their hosts is what it was before, byte for byte: tables, rules, routes,
    links, addresses and sysctls. What others keep there never changes, not even what they put at our own numbers meanwhile, and another
    peering's flows lose nothing all the while."""
    hosts = [f"{site}.{host}" for site in SITES for host in ("edge", "worker")]
    async with live.undisturbed(*ACROSS):
        await live.publish(*sites())
        for host in hosts:
            put_foreign(mesh, host)
        before, others = ({host: look(mesh, host) for host in hosts} for look in (type(mesh).state, foreign))
        await live.publish(joined())
        assert sum("turin" in check.name for check in await live.carries()) == 4
        assert {host: foreign(mesh, host) for host in hosts} == others
        for host in hosts:
            by_ip(mesh, host, MEETING_IP.format(verb="add"))
        met = {host: foreign(mesh, host) for host in hosts}
        await live.delete(joined())
        assert {host: foreign(mesh, host) for host in hosts} == met
        for host in hosts:
            by_ip(mesh, host, MEETING_IP.format(verb="del"))
        after = {host: mesh.state(host) for host in hosts}
        for host in hosts:
            for what, text in before[host].items():
                assert after[host][what] == text, f"{what} of {host}"
        await live.publish(joined())
        assert sum("turin" in check.name for check in await live.carries()) == 4
        assert {host: foreign(mesh, host) for host in hosts} == others
    assert not [event for event in live.board.drift if event.cluster in SITES]


async def test_tunnels_move_to_ports_that_their_neighbours_hold(mesh, live):
    """The first port goes up by one and down again: every device gets the port that the next one held, and all pods reach each other."""
    peering = mesh.object("Peering/rome/rome-milan")
    for port in (peering.port + 1, peering.port):
        await live.publish(replace(peering, port=port))
        await live.carries()
        assert {report.outcome for report in live.board.reports.values()} == {"applied"}
