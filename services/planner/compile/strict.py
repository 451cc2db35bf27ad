"""Strict mode: what should be encrypted and is not is counted (`audit`), and dropped too (`enforce`), in both directions.

Only the uplink is looked at: a pod that has just moved here is not yet known to be here, and must be reached all the same. A rule of
`audit` and one of `enforce` have the same matches, so that what is counted is what would be dropped. Each has a comment for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from schemas.host_objects import NftChain, NftElement, NftSet, PlanObject
from schemas.nft import Comment, Counter, Match, Rule, Selector, Verdict
from schemas.topology import Cluster, Node
from schemas.values import IPV6, Address
from services.planner import layout, mesh, names
from services.planner.compile import control
from services.planner.compile.encryption import NEIGHBOURS, wears
from services.planner.compile.gateway import overlay_port
from services.planner.compile.words import WORDS

_LOCAL = Match("fib daddr type", ("local",))


def base(cluster: Cluster, node: Node) -> Iterator[PlanObject]:
    """Sets and chains of a node that encrypts; nothing with strict mode off."""
    if cluster.strict == "off":
        return
    table = names.mesh_table(cluster.name)
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        yield NftSet(table, f"enc{words.suffix}", words.type, interval=True)
        yield NftSet(table, f"clear_roaming{words.suffix}", words.type)
        if cluster.routing == "overlay":  # natively it is there to lead packets
            yield NftSet(table, f"roaming{words.suffix}", words.type)
    leaving = (*control.passes_both(cluster, arriving=False), *_leaving(cluster, node))
    arriving = (*control.passes_both(cluster, arriving=True), *_arriving(cluster, node))
    yield NftChain(table, "strict_out", leaving, "filter", "postrouting", layout.PRIORITY_LAST)
    yield NftChain(table, "strict_in", arriving, "filter", "prerouting", layout.PRIORITY_RAW)


def peer(cluster: Cluster, there: Node) -> Iterator[PlanObject]:
    """The pods of a node that encrypts."""
    if cluster.strict != "off":
        for prefix in there.pod_prefixes:
            yield NftElement(names.mesh_table(cluster.name), f"enc{WORDS[prefix.family].suffix}", prefix.bare)


def pod(cluster: Cluster, address: Address, *, encrypted: bool) -> Iterator[PlanObject]:
    """A pod of another node, at an address that may be inside the prefixes of any node."""
    if cluster.strict != "off" and not (encrypted and cluster.routing == "native"):
        which = "roaming" if encrypted else "clear_roaming"
        yield NftElement(names.mesh_table(cluster.name), f"{which}{WORDS[address.family].suffix}", address)


def _leaving(cluster: Cluster, node: Node) -> Iterator[Rule]:
    by_uplink, end = Match("oifname", (node.uplink,)), _end(cluster, "left")
    for family in mesh.pod_families(cluster):
        for who in _pods(WORDS[family].destination, WORDS[family].suffix):
            yield (by_uplink, *who, *end("pods'"))
    if cluster.routing == "overlay":
        outer = Match("udp dport", (overlay_port(cluster),))
        yield from ((by_uplink, outer, who, *end("overlay's")) for who in _nodes(node, leaving=True))
    if cluster.wireguard.nodes:
        if IPV6 in mesh.underlay_families(node):
            yield NEIGHBOURS
        other = wears(cluster, cluster.marks.encrypted, "!=")
        yield from ((by_uplink, other, who, *end("nodes'")) for who in _nodes(node, leaving=True))


def _arriving(cluster: Cluster, node: Node) -> Iterator[Rule]:
    by_uplink, end = Match("iifname", (node.uplink,)), _end(cluster, "arrived")
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        to_pods = Match(words.destination, (f"@pods{words.suffix}",))
        for who in _pods(words.source, words.suffix):
            yield (by_uplink, *who, to_pods, *end("pods'"))
            if cluster.wireguard.nodes and cluster.routing == "native":
                yield (by_uplink, *who, _LOCAL, *end("pods'"))
    if cluster.routing == "overlay":
        outer = Match("udp dport", (overlay_port(cluster),))
        yield from ((by_uplink, outer, who, *end("overlay's")) for who in _nodes(node, leaving=False))
    if cluster.wireguard.nodes:
        if IPV6 in mesh.underlay_families(node):
            yield NEIGHBOURS
        yield (_LOCAL, Match("udp dport", (str(cluster.wireguard.port),)), Verdict("return"))
        yield from ((by_uplink, who, *end("nodes'")) for who in _nodes(node, leaving=False))


def _pods(selector: Selector, suffix: str) -> Iterable[tuple[Match, ...]]:
    """The addresses of pods on nodes that encrypt: those that prefixes lead to, and those that roam."""
    yield (Match(selector, (f"@enc{suffix}",)), Match(selector, (f"@clear_roaming{suffix}",), "!="))
    yield (Match(selector, (f"@roaming{suffix}",)),)


def _nodes(node: Node, *, leaving: bool) -> Iterator[Match]:
    for family in mesh.underlay_families(node):
        words = WORDS[family]
        yield Match(words.destination if leaving else words.source, (f"@encnodes{words.suffix}",))


def _end(cluster: Cluster, how: str) -> Callable[[str], Rule]:
    """What ends a rule: a packet of this kind `how` in clear."""

    def of(whose: str) -> Rule:
        drop = (Verdict("drop"),) if cluster.strict == "enforce" else ()
        return (Counter(), *drop, Comment(f"strict {cluster.strict}: {whose} packets that {how} in clear"))

    return of
