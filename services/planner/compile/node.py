"""A node's part of a peering: the overlay link to the gateway, the routes to the remote cluster, and what keeps the CNI's NAT away.

A pod's packet for the remote cluster goes by the node's table to the gateway, with its source untouched. A remote prefix never leaves by
another link, whatever is missing: the table and main hold `unreachable` for it, and nftables drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.nft import Counter, Match, Nat, Verdict
from schemas.plan import MAIN_TABLE, NextHop, NftChain, NftElement, NftSet, NftTable, PlanObject, PolicyRule, Route, Sysctl
from schemas.topology import Node
from schemas.values import Family, Prefix
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile.gateway import guard, notrack, overlay_link, overlay_port
from services.planner.compile.words import FORWARDING, WORDS, of_family
from services.planner.families import carried, overlay_address
from services.planner.state import Attachment, HostId, State, seen_prefixes

_DROP = (Counter(), Verdict("drop"))
_OVERLAY = f"{names.OVERLAY_LINK_PREFIX}*"


def base(state: State, allocations: Allocations, attachment: Attachment, item: Node) -> Iterator[PlanObject]:
    """All that a node holds for one peering of its cluster."""
    cluster = state.clusters[item.cluster]
    gateway = state.gateways[item.cluster][attachment.end.gateway]
    seen = [prefix for prefix, _ in seen_prefixes(state, attachment)]
    families = carried(state, attachment.peering)
    yield from (Sysctl(FORWARDING[family], "1") for family in families)
    for prefix in seen:
        yield guard(MAIN_TABLE, prefix)
        yield guard(layout.NODE_TABLE, prefix)
    for prefix in item.pod_prefixes:
        # A decapsulated packet whose pod is gone must not follow the default route out of the uplink.
        if prefix.family in families:
            yield guard(MAIN_TABLE, prefix)
    yield from (PolicyRule(layout.RULE_NODE, layout.NODE_TABLE, family=family) for family in families)
    table = names.table(*peering_id(attachment))
    yield from _firewall(table, item, seen, cluster.pod_prefixes, families)
    yield from notrack(table, (overlay_port(cluster),))
    yield from overlay_link(allocations, cluster, item, gateway, families)
    for prefix in seen:
        via = overlay_address(cluster, allocations.number(HostId(*attachment.host)), prefix.family)
        yield Route(layout.NODE_TABLE, prefix, hops=(NextHop(names.overlay_link(gateway.name), via, onlink=True),))


def _firewall(table: str, item: Node, remote: Sequence[Prefix], pods: Sequence[Prefix], families: Iterable[Family]) -> Iterator[PlanObject]:
    yield NftTable(table)
    closed, keep_source = [], []
    for family in families:
        words = WORDS[family]
        to_remote = Match(words.destination, (f"@remote{words.suffix}",))
        yield NftSet(table, f"remote{words.suffix}", words.type, interval=True)
        yield NftSet(table, f"pods{words.suffix}", words.type, words.type, interval=True, value_interval=True)
        yield from (NftElement(table, f"remote{words.suffix}", prefix.bare) for prefix in of_family(remote, family))
        yield from (NftElement(table, f"pods{words.suffix}", prefix.bare, prefix.bare) for prefix in of_family(pods, family))
        closed.append((to_remote, Match("oifname", (_OVERLAY,), "!="), *_DROP))
        keep_source.append((to_remote, Nat("snat", f"pods{words.suffix}", family=family)))
    yield NftChain(table, "closed", tuple(closed), "filter", "postrouting", layout.PRIORITY_MANGLE)
    # In forward, not in postrouting: there the overlay's own outer packets still count as coming from the overlay link.
    out_of_the_uplink = (Match("iifname", (_OVERLAY,)), Match("oifname", (item.uplink,)), *_DROP)
    yield NftChain(table, "arriving", (out_of_the_uplink,), "filter", "forward", layout.PRIORITY_FILTER)
    # A translation of pods to themselves settles the flow's source before the CNI would masquerade it.
    yield NftChain(table, "keep_source", tuple(keep_source), "nat", "postrouting", layout.PRIORITY_BEFORE_SRCNAT)
