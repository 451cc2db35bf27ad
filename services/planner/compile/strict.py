"""What should be encrypted and is not, in both directions: counted and shown to the auditor, and in strict mode `enforce` dropped too.

Only the uplink is looked at: a pod that has just moved here is not yet known to be here, and must be reached all the same. Rules have the
same matches whatever the mode, so that what is counted is what would be dropped. Each leads to a chain for whose packets they are, which
counts all of them and shows a few a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from schemas.encryption import PLAINTEXT, Direction, Traffic, log_prefix
from schemas.host_objects import NftChain, NftElement, NftSet, PlanObject
from schemas.nft import Comment, Counter, Limit, Log, Match, Rule, Selector, Verdict
from schemas.topology import Cluster, Node
from schemas.values import IPV6, Address
from services.planner import layout, mesh, names
from services.planner.compile import control
from services.planner.compile.encryption import NEIGHBOURS, wears
from services.planner.compile.gateway import overlay_port
from services.planner.compile.words import WORDS

_LOCAL = Match("fib daddr type", ("local",))
_SHOWN = Limit(10, 20)
"""Of each kind of packet, so that many of one do not hide another."""
_SHOWN_BYTES = 192
"""An outer packet's headers by IPv6 with an overlay's, and the inner packet's up to its ports."""
_SAYS: dict[Direction, str] = {"out": "left in clear", "in": "arrived in clear"}


def base(cluster: Cluster, node: Node, *, overlay: bool) -> Iterator[PlanObject]:
    """Sets and chains of a node that encrypts, and speaks to others by an `overlay` or not."""
    table = names.mesh_table(cluster.name)
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        yield NftSet(table, f"enc{words.suffix}", words.type, interval=True)
        yield NftSet(table, f"clear_roaming{words.suffix}", words.type)
        if cluster.routing == "overlay":  # natively it is there to lead packets
            yield NftSet(table, f"roaming{words.suffix}", words.type)
    yield from _ends(cluster, table, overlay=overlay)
    leaving = (_elsewhere("oifname", node), *control.passes_both(cluster, arriving=False), *_leaving(cluster, node, overlay=overlay))
    arriving = (_elsewhere("iifname", node), *control.passes_both(cluster, arriving=True), *_arriving(cluster, node, overlay=overlay))
    yield NftChain(table, "strict_out", leaving, "filter", "postrouting", layout.PRIORITY_LAST)
    yield NftChain(table, "strict_in", arriving, "filter", "prerouting", layout.PRIORITY_RAW)


def peer(cluster: Cluster, there: Node) -> Iterator[PlanObject]:
    """The pods of a node that encrypts."""
    for prefix in there.pod_prefixes:
        yield NftElement(names.mesh_table(cluster.name), f"enc{WORDS[prefix.family].suffix}", prefix.bare)


def pod(cluster: Cluster, address: Address, *, encrypted: bool) -> Iterator[PlanObject]:
    """A pod of another node, at an address that may be inside the prefixes of any node."""
    if not (encrypted and cluster.routing == "native"):
        which = "roaming" if encrypted else "clear_roaming"
        yield NftElement(names.mesh_table(cluster.name), f"{which}{WORDS[address.family].suffix}", address)


def _elsewhere(selector: Selector, node: Node) -> Rule:
    """The first rule, which most packets end at: those that do not pass the uplink."""
    return (Match(selector, (node.uplink,), "!="), Verdict("return"))


def _leaving(cluster: Cluster, node: Node, *, overlay: bool) -> Iterator[Rule]:
    end = _end("out")
    for family in mesh.pod_families(cluster):
        for who in _pods(WORDS[family].destination, WORDS[family].suffix):
            yield (*who, end("pods"))
    if overlay:
        outer = Match("udp dport", (overlay_port(cluster),))
        yield from ((outer, who, end("overlay")) for who in _nodes(node, leaving=True))
    if cluster.wireguard.nodes:
        if IPV6 in mesh.underlay_families(node):
            yield NEIGHBOURS
        other = wears(cluster, cluster.marks.encrypted, "!=")
        yield from ((other, who, end("nodes")) for who in _nodes(node, leaving=True))


def _arriving(cluster: Cluster, node: Node, *, overlay: bool) -> Iterator[Rule]:
    end = _end("in")
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        to_pods = Match(words.destination, (f"@pods{words.suffix}",))
        for who in _pods(words.source, words.suffix):
            yield (*who, to_pods, end("pods"))
            if cluster.wireguard.nodes and cluster.routing == "native":
                yield (*who, _LOCAL, end("pods"))
    if overlay:
        outer = Match("udp dport", (overlay_port(cluster),))
        yield from ((outer, who, end("overlay")) for who in _nodes(node, leaving=False))
    if cluster.wireguard.nodes:
        if IPV6 in mesh.underlay_families(node):
            yield NEIGHBOURS
        yield (_LOCAL, Match("udp dport", tuple(map(str, mesh.ports(cluster)))), Verdict("return"))
        yield from ((who, end("nodes")) for who in _nodes(node, leaving=False))


def _pods(selector: Selector, suffix: str) -> Iterable[tuple[Match, ...]]:
    """The addresses of pods on nodes that encrypt: those that prefixes lead to, and those that roam."""
    yield (Match(selector, (f"@enc{suffix}",)), Match(selector, (f"@clear_roaming{suffix}",), "!="))
    yield (Match(selector, (f"@roaming{suffix}",)),)


def _nodes(node: Node, *, leaving: bool) -> Iterator[Match]:
    for family in mesh.underlay_families(node):
        words = WORDS[family]
        yield Match(words.destination if leaving else words.source, (f"@encnodes{words.suffix}",))


def _end(direction: Direction) -> Callable[[Traffic], Verdict]:
    """What ends a rule about a packet in clear."""
    return lambda traffic: Verdict("jump", _chain(direction, traffic))


def _chain(direction: Direction, traffic: Traffic) -> str:
    return f"clear_{direction}_{traffic}"


def _ends(cluster: Cluster, table: str, *, overlay: bool) -> Iterator[NftChain]:
    is_there: dict[Traffic, bool] = {"pods": True, "overlay": overlay, "nodes": cluster.wireguard.nodes}
    # Either way nothing more is looked at: no packet counts twice.
    end = Verdict("drop" if cluster.strict == "enforce" else "accept")
    for (direction, traffic), point in PLAINTEXT.items():
        if is_there[traffic]:
            group = cluster.wireguard.audit_group
            shown = ((_SHOWN, Log(group, log_prefix(direction, traffic), _SHOWN_BYTES)),) if group is not None else ()
            says = Comment(point.comment(f"{_SAYS[direction]}, strict {cluster.strict}"))
            yield NftChain(table, _chain(direction, traffic), (*shown, (Counter(), end, says)))
