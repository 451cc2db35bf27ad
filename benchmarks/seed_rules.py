"""What a gateway of the seed holds in the place of a plan's rules, tables and nftables, as text for ``ip -batch`` and nft. Pure.

The prefixes, links and next hops are the plan's own, so that both lead the same packets the same way. Links to nodes are made as the plan
says them; routes to nodes are in the main table, or one table per node which policy rules look up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from benchmarks.topologies import PODS
from schemas.host_objects import LinkAddress, NftElement, PlanObject, Route, VxlanLink
from schemas.plan import HostPlan
from schemas.values import Address, Prefix

SEEN_PODS = Prefix("10.61.0.0/16")
"""How rome sees the pods of milan, which have the prefix `PODS` too: what ``topologies.mesh`` remaps them to."""
FROM_TUNNEL, FROM_OVERLAY = 0xFE00, 0xFF00
_OUTGOING_TABLE, _FIRST_TABLE, _FIRST_PRIORITY = 9999, 10_000, 1000
_VXLAN_PORT = 4789


class Target(Struct, frozen=True):
    """A node as a gateway reaches it: its pods, by the address `via` behind `link`, whose far end is `underlay`."""

    pods: Prefix
    via: Address
    underlay: Address
    link: VxlanLink


def targets(plan: HostPlan) -> list[Target]:
    """Every node of a gateway's plan, by its one pod prefix, in the order of the prefixes."""
    found = []
    objects = plan.objects()
    for item in objects.values():
        if isinstance(item, Route) and PODS.contains(item.prefix) and item.prefix != PODS and item.hops:
            (hop,) = item.hops
            link = objects.get(f"link {hop.link}")
            if hop.via is not None and isinstance(link, VxlanLink) and link.remote is not None:
                found.append(Target(item.prefix, hop.via, link.remote, link))
    return sorted(found, key=lambda target: target.pods.packed)


def overlay(plan: HostPlan) -> list[str]:
    """The plan's links to nodes with their addresses."""
    objects = plan.objects().values()
    links = [item for item in objects if isinstance(item, VxlanLink)]
    names = {item.name for item in links}
    lines = [
        f"link add {item.name} mtu {item.mtu} address {item.mac} type vxlan"
        f" id {item.vni} local {item.local} remote {item.remote} dstport {item.port} nolearning"
        for item in links
    ]
    lines += [f"link set {name} up" for name in sorted(names)]
    addresses = (item for item in objects if isinstance(item, LinkAddress) and item.link in names)
    return lines + [f"address add {item.address}/{item.length} dev {item.link}" for item in addresses]


def one_table(nodes: Sequence[Target], tunnels: Sequence[str]) -> list[str]:
    """No rule at all: all nodes' prefixes in the main table, and what is left of the pods' prefix by the tunnels, under both its names."""
    outgoing = [f"route add {prefix} {_hops(tunnels)}" for prefix in (PODS, SEEN_PODS)]
    return outgoing + [f"route add {node.pods} via {node.via} dev {node.link.name} onlink" for node in nodes]


def rule_per_node(nodes: Sequence[Target], tunnels: Sequence[str]) -> list[str]:
    """The seed's N: packets with the tunnels' mark that are for a node's pods look up that node's table."""
    return (
        _outgoing(tunnels)
        + _tables(nodes)
        + _rules(f"fwmark {FROM_TUNNEL:#x} to {node.pods} lookup {table}" for node, table in _numbered(nodes))
    )


def rule_per_node_and_tunnel(nodes: Sequence[Target], tunnels: Sequence[str]) -> list[str]:
    """What the seed came from, MxN: the same by the interface that the packet came in by, all rules of a node one after the other."""
    return (
        _outgoing(tunnels)
        + _tables(nodes)
        + _rules(f"iif {tunnel} to {node.pods} lookup {table}" for node, table in _numbered(nodes) for tunnel in tunnels)
    )


def nftables(plan: HostPlan, *, marks_tunnels: bool) -> str:
    """The seed's prefix NAT, MSS clamp and notrack of the overlay, for the prefixes of this plan.

    What came out of a tunnel is known by a mark, as the seed does it, or by its interface, as before. A mark stays on the packet when it is
    put into the overlay, and then the kernel looks the outer packet's route up anew, through all rules.
    """
    objects = list(plan.objects().values())
    incoming = f"meta mark {FROM_TUNNEL:#x}" if marks_tunnels else 'iifname "mt.*"'
    dnat = [f"    ip daddr {seen} meta mark {FROM_OVERLAY:#x} dnat prefix to {real}" for seen, real in _pairs(objects, "to_real")]
    snat = [f'    oifname != "uplink" ip saddr {real} {incoming} snat prefix to {seen}' for real, seen in _pairs(objects, "to_seen")]
    notrack = [f"    udp dport {_VXLAN_PORT} notrack"]
    mark = [f'    iifname "mo.*" meta mark set {FROM_OVERLAY:#x}']
    if marks_tunnels:
        mark.insert(0, f'    iifname "mt.*" meta mark set {FROM_TUNNEL:#x}')
    clamp = ['    meta l4proto tcp oifname "mt.*" tcp flags syn tcp option maxseg size set rt mtu']
    chains = [
        ("notrack_in", "filter hook prerouting priority raw", notrack),
        ("notrack_out", "filter hook output priority raw", notrack),
        ("classify", "filter hook prerouting priority mangle", mark),
        ("outgoing", "nat hook prerouting priority dstnat", dnat),
        ("mss_clamping", "filter hook forward priority filter", clamp),
        ("incoming", "nat hook postrouting priority srcnat", snat),
    ]
    body = [line for name, hook, rules in chains for line in (f"  chain {name} {{", f"    type {hook}; policy accept;", *rules, "  }")]
    return "\n".join(["table ip seed {", *body, "}", ""])


def _outgoing(tunnels: Sequence[str]) -> list[str]:
    """One rule, before all others, for what came from nodes; it was one already before the tunnels' packets had a mark."""
    return [
        f"route add {PODS} table {_OUTGOING_TABLE} {_hops(tunnels)}",
        f"rule add priority {_FIRST_PRIORITY - 1} fwmark {FROM_OVERLAY:#x} to {PODS} lookup {_OUTGOING_TABLE}",
    ]


def _hops(tunnels: Sequence[str]) -> str:
    return " ".join(f"nexthop dev {tunnel}" for tunnel in tunnels)


def _pairs(objects: Iterable[PlanObject], name: str) -> list[tuple[str, str]]:
    return sorted((item.element, item.value) for item in objects if isinstance(item, NftElement) and item.set == name)


def _numbered(nodes: Sequence[Target]) -> Iterator[tuple[Target, int]]:
    return ((node, _FIRST_TABLE + number) for number, node in enumerate(nodes))


def _tables(nodes: Sequence[Target]) -> list[str]:
    return [f"route add {node.pods} via {node.via} dev {node.link.name} onlink table {table}" for node, table in _numbered(nodes)]


def _rules(selectors: Iterable[str]) -> list[str]:
    return [f"rule add priority {_FIRST_PRIORITY + number} {selector}" for number, selector in enumerate(selectors)]
