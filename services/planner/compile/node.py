"""A node's part of a peering: the overlay link to the gateway, the routes to the remote cluster, and what keeps the CNI's NAT away.

A pod's packet for the remote cluster goes by the node's table to the gateway, with its source untouched. A remote prefix never leaves by
another link, whatever is missing: the table and main hold `unreachable` for it, and nftables drops it.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.nft import Counter, Match, Nat, Verdict
from schemas.plan import MAIN_TABLE, NextHop, NftChain, NftElement, NftSet, NftTable, PlanObject, PolicyRule, Route, Sysctl
from schemas.topology import Node
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile.gateway import element, guard, notrack, overlay_link
from services.planner.state import Attachment, HostId, State, seen_prefixes

_DROP = (Counter(), Verdict("drop"))
_OVERLAY = f"{names.OVERLAY_LINK_PREFIX}*"


def base(state: State, allocations: Allocations, attachment: Attachment, item: Node) -> Iterator[PlanObject]:
    """All that a node holds for one peering of its cluster."""
    cluster = state.clusters[item.cluster]
    gateway = state.gateways[item.cluster][attachment.end.gateway]
    seen = [prefix for prefix, _ in seen_prefixes(state, attachment)]
    yield Sysctl("net/ipv4/ip_forward", "1")
    for prefix in seen:
        yield guard(MAIN_TABLE, prefix)
        yield guard(layout.NODE_TABLE, prefix)
    for prefix in item.pod_prefixes:
        # A decapsulated packet whose pod is gone must not follow the default route out of the uplink.
        yield guard(MAIN_TABLE, prefix)
    yield PolicyRule(layout.RULE_NODE, layout.NODE_TABLE)
    yield from _firewall(
        names.table(*peering_id(attachment)), item, [element(prefix) for prefix in seen], [element(p) for p in cluster.pod_prefixes]
    )
    yield from overlay_link(allocations, cluster, item, gateway)
    via = cluster.internal_prefix.address(allocations.number(HostId(*attachment.host)))
    for prefix in seen:
        yield Route(layout.NODE_TABLE, prefix, hops=(NextHop(names.overlay_link(gateway.name), via, onlink=True),))


def _firewall(table: str, item: Node, remote: list[str], pods: list[str]) -> Iterator[PlanObject]:
    yield NftTable(table)
    yield NftSet(table, "remote", "ipv4_addr", interval=True)
    yield NftSet(table, "pods", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True)
    yield from (NftElement(table, "remote", prefix) for prefix in remote)
    yield from (NftElement(table, "pods", prefix, prefix) for prefix in pods)
    yield from notrack(table, (str(layout.VXLAN_PORT),))
    not_to_the_overlay = (Match("ip daddr", ("@remote",)), Match("oifname", (_OVERLAY,), "!="), *_DROP)
    yield NftChain(table, "closed", (not_to_the_overlay,), "filter", "postrouting", layout.PRIORITY_MANGLE)
    # In forward, not in postrouting: there the overlay's own outer packets still count as coming from the overlay link.
    out_of_the_uplink = (Match("iifname", (_OVERLAY,)), Match("oifname", (item.uplink,)), *_DROP)
    yield NftChain(table, "arriving", (out_of_the_uplink,), "filter", "forward", layout.PRIORITY_FILTER)
    # A translation of pods to themselves settles the flow's source before the CNI would masquerade it.
    keep_source = (Match("ip daddr", ("@remote",)), Nat("snat", "pods"))
    yield NftChain(table, "keep_source", (keep_source,), "nat", "postrouting", layout.PRIORITY_BEFORE_SRCNAT)
