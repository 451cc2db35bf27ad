"""A node's part of a peering: the overlay link to the gateway, the routes to the remote cluster, and what keeps the CNI's NAT away.

A pod's packet for the remote cluster goes by the node's table to the gateway, with its source untouched. A remote prefix never leaves by
another link, whatever is missing: the table and main hold `unreachable` for it, and nftables drops it.

What no pod of the cluster sent (the node itself, a NodePort's clients, another cluster's pods on their way through) gets a source that
peers can answer: the node's own external address, or its overlay address, which the gateway translates (``Cluster.sources``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.host_objects import MAIN_TABLE, NextHop, NftChain, NftElement, NftSet, NftTable, PlanObject, PolicyRule, Route, Sysctl
from schemas.nft import Masquerade, Match, Nat, Verdict
from schemas.topology import Cluster, Node
from schemas.values import Address, Family, Prefix
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile import control, drops, uplinks
from services.planner.compile.gateway import guard, notrack, overlay_link, overlay_port
from services.planner.compile.words import EVERYWHERE, FORWARDING, WORDS, of_family
from services.planner.external import is_per_node, node_source, shared_source
from services.planner.families import carried, overlay_address
from services.planner.state import Attachment, HostId, State, seen_prefixes

_OVERLAY = f"{names.OVERLAY_LINK_PREFIX}*"


def base(state: State, allocations: Allocations, attachment: Attachment, item: Node) -> Iterator[PlanObject]:
    """All that a node holds for one peering of its cluster."""
    cluster = state.clusters[item.cluster]
    gateway = state.gateways[item.cluster][attachment.end.gateway]
    seen = [prefix for prefix, _ in seen_prefixes(state, attachment)]
    families = carried(state, attachment.peering)
    yield from (Sysctl(FORWARDING[family], "1") for family in families)
    yield from uplinks.objects(item)
    for prefix in seen:
        yield guard(MAIN_TABLE, prefix)
        yield guard(layout.NODE_TABLE, prefix)
    for prefix in (*item.pod_prefixes, *cluster.external_prefixes):
        # A decapsulated packet whose pod is gone, or whose connection is forgotten, must not follow the default route out of the uplink.
        if prefix.family in families:
            yield guard(MAIN_TABLE, prefix)
    yield from (PolicyRule(layout.RULE_NODE, layout.NODE_TABLE, family=family) for family in families)
    table = names.table(*peering_id(attachment))
    yield from _firewall(table, item, seen, cluster, families)
    yield from notrack(table, (overlay_port(cluster),))
    number = allocations.number(HostId(item.cluster, item.name))
    for family in families:
        if (source := _source(cluster, number, family)) is not None:
            yield NftElement(table, f"others{WORDS[family].suffix}", EVERYWHERE[family], source)
    yield from overlay_link(allocations, cluster, item, gateway, families)
    for prefix in seen:
        via = overlay_address(cluster, allocations.number(HostId(*attachment.host)), prefix.family)
        yield Route(layout.NODE_TABLE, prefix, hops=(NextHop(names.overlay_link(gateway.name), via, onlink=True),))


def _source(cluster: Cluster, number: int, family: Family) -> Address | None:
    """What others than pods appear as when they leave the node; None where the cluster has no external address for them."""
    if is_per_node(cluster, family):
        return node_source(cluster, number, family)
    return overlay_address(cluster, number, family) if shared_source(cluster, family) is not None else None


def _firewall(table: str, item: Node, remote: Sequence[Prefix], cluster: Cluster, families: Iterable[Family]) -> Iterator[PlanObject]:
    yield NftTable(table)
    yield from control.objects(table, cluster)
    closed, arriving, own, others, masquerade, pods = [*control.passes(cluster)], [], [], [], [], cluster.pod_prefixes
    for family in families:
        words = WORDS[family]
        to_remote = Match(words.destination, (f"@remote{words.suffix}",))
        yield NftSet(table, f"remote{words.suffix}", words.type, interval=True)
        yield NftSet(table, f"kept{words.suffix}", words.type, words.type, interval=True, value_interval=True)
        yield NftSet(table, f"others{words.suffix}", words.type, words.type, interval=True)
        yield NftSet(table, f"mapped{words.suffix}", words.type)
        yield NftSet(table, f"masqueraded{words.suffix}", words.type)
        yield from (NftElement(table, f"remote{words.suffix}", prefix.bare) for prefix in of_family(remote, family))
        yield from (NftElement(table, f"kept{words.suffix}", prefix.bare, prefix.bare) for prefix in of_family(pods, family))
        closed.append((to_remote, Match("oifname", (_OVERLAY,), "!="), *drops.NOT_BY_OVERLAY))
        arriving.append((_ARRIVING, Match(words.destination, (f"@mapped{words.suffix}",)), Verdict("accept")))
        own.append((to_remote, Nat("snat", f"kept{words.suffix}", family=family)))
        others.append((to_remote, Nat("snat", f"others{words.suffix}", prefix=False, family=family)))
        masquerade.append((_ARRIVING, Match(words.destination, (f"@masqueraded{words.suffix}",)), Masquerade()))
    yield NftChain(table, "closed", tuple(closed), "filter", "postrouting", layout.PRIORITY_MANGLE)
    # In forward, not in postrouting: there the overlay's own outer packets still count as coming from the overlay link.
    out_of_the_uplink = (_ARRIVING, Match("oifname", (item.uplink,)), *drops.OUT_AGAIN)
    yield NftChain(table, "arriving", (_ANSWER, *arriving, out_of_the_uplink), "filter", "forward", layout.PRIORITY_FILTER)
    # A translation of pods to themselves settles the flow's source before the CNI would masquerade it.
    yield NftChain(
        table, "senders", (*control.passes(cluster), *own, *others, *masquerade), "nat", "postrouting", layout.PRIORITY_BEFORE_SRCNAT
    )


_ARRIVING = Match("iifname", (_OVERLAY,))
_ANSWER = (_ARRIVING, Match("ct direction", ("reply",)), Match("ct status", ("snat",)), Verdict("accept"))
"""The answer to a NodePort's client goes back to where that is. What pods send is never translated here, so no pod's answer is meant."""
