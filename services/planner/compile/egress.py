"""A node's part in how chosen pods leave their cluster through a chosen node (``EgressPolicy``).

On all nodes, what a chosen pod sends outside gets the mark of its exit node once its destination is final, and by that mark is looked up in
the exit's table (rule 903), whose only way is the overlay to that node: in native routing too, since a WireGuard device leads "all the
rest" to one peer at most. The outer packet is encrypted like any of an overlay. The table ends in `unreachable`, and what bears such a mark
and would leave by another link is dropped: a chosen pod never leaves by its own node.

On the exit node it leaves as the policy's address; tracking turns the answer back. Natively, the answer goes by the overlay as well: its
source is outside, and a peer takes packets from pods only. What comes out of the overlay for outside and is no chosen pod's is dropped.

What is said in a flow's reply direction is never led away: pods answer who reached them by their own node by that. So an answer from an
exit node must not begin a flow where the pod's node has forgotten the pod's own: it is dropped, and the pod's next packet begins it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from schemas.host_objects import NextHop, NftChain, NftElement, NftSet, NftTable, PlanObject, PolicyRule, Route, Sysctl
from schemas.nft import ClampMss, Match, Nat, Rule, SetMark, Verdict, VerdictMap
from schemas.topology import Cluster, EgressPolicy, Node
from schemas.values import Address, Family, Prefix
from services.planner import egress, layout, mesh, names
from services.planner.compile import control, drops
from services.planner.compile.gateway import guard
from services.planner.compile.mesh_overlay import link_to_node
from services.planner.compile.words import EVERYWHERE, FORWARDING, WORDS, of_family
from services.planner.families import overlay_address

_OVERLAY = f"{names.MESH_LINK_PREFIX}*"
_BY_OVERLAY, _FROM_OVERLAY = Match("oifname", (_OVERLAY,)), Match("iifname", (_OVERLAY,))
_NOT_BY_OVERLAY = Match("oifname", (_OVERLAY,), "!=")
_REPLY, _ORIGINAL = Match("ct direction", ("reply",)), Match("ct direction", ("original",))
_RETURN = Verdict("return")


class Role(NamedTuple):
    """A node's part in the policies of its cluster: what is `inside` for all, whether it `is_exit` of any, whether it has a device.

    `narrowed` are the policies with destinations of their own that it leads elsewhere, and those that it lets out.
    """

    inside: tuple[Prefix, ...]
    hosts: tuple[Address, ...]
    is_exit: bool
    is_meant: bool
    led: tuple[EgressPolicy, ...] = ()
    let_out: tuple[EgressPolicy, ...] = ()


def base(cluster: Cluster, role: Role) -> Iterator[PlanObject]:
    """What does not depend on single policies, but for which of them have destinations of their own."""
    table = names.mesh_table(cluster.name)
    yield NftTable(table)
    yield from control.objects(table, cluster)
    for family in mesh.pod_families(cluster):
        yield Sysctl(FORWARDING[family], "1")
        if role.is_exit and cluster.routing == "native":
            yield PolicyRule(layout.RULE_EGRESS, layout.MESH_TABLE, egress.mark(cluster.marks, 0), cluster.marks.mask, family=family)
        yield from _sets(cluster, role, table, family)
    yield NftChain(table, "egress", tuple(_steer(cluster, role)), "filter", "prerouting", layout.PRIORITY_AFTER_STEERING)
    yield NftChain(table, "egress_forward", tuple(_forward(cluster)), "filter", "forward", layout.PRIORITY_FILTER)
    yield NftChain(table, "egress_closed", tuple(_closed(cluster)), "filter", "postrouting", layout.PRIORITY_BEFORE_NAT)
    yield NftChain(table, "egress_nat", tuple(_nat(cluster, role)), "nat", "postrouting", layout.PRIORITY_BEFORE_SRCNAT)
    if leave := tuple(_leave(cluster, role)):
        yield NftChain(table, "egress_leave", leave, "filter", "postrouting", layout.PRIORITY_LAST)


def host(cluster: Cluster, addresses: Iterable[Address]) -> Iterator[PlanObject]:
    """The underlay addresses of a host of the cluster, which are not outside."""
    for address in addresses:
        if address.family in mesh.pod_families(cluster):
            yield NftElement(names.mesh_table(cluster.name), f"hosts{WORDS[address.family].suffix}", address)


def way_out(cluster: Cluster, families: Iterable[Family], there: Node, number: int, slot: int, *, leads: bool) -> Iterator[PlanObject]:
    """The way to an exit node, for one with underlay addresses of `families`; nothing passes until it `leads` there."""
    table, link = layout.EGRESS_TABLE + slot, link_to_node(cluster, families, there)
    for family in mesh.pod_families(cluster):
        yield PolicyRule(layout.RULE_EGRESS, table, egress.mark(cluster.marks, slot), cluster.marks.mask, family=family)
        yield guard(table, EVERYWHERE[family])
        if leads:
            yield Route(table, EVERYWHERE[family], hops=(NextHop(link, overlay_address(cluster, number, family), onlink=True),))


def led(cluster: Cluster, item: EgressPolicy, slot: int) -> Iterator[PlanObject]:
    """A policy on a node that leads its pods to an exit node."""
    table, mark = names.mesh_table(cluster.name), SetMark(egress.mark(cluster.marks, slot), cluster.marks.mask)
    chain, rules = f"by.{item.name}", list[Rule]()
    for family in egress.families(cluster, item):
        words = WORDS[family]
        rules.append((*_narrowed(item, family), mark))
        for prefix in of_family(item.pods, family):
            yield NftElement(table, f"led{words.suffix}", prefix.bare, f"jump {chain}")
            yield NftElement(table, _own_map("kept", item, family), prefix.bare, prefix.bare)
    yield NftChain(table, chain, tuple(rules) if item.destinations else ((mark,),))


def let_out(cluster: Cluster, item: EgressPolicy, node: Node) -> Iterator[PlanObject]:
    """A policy on a node that lets its pods out."""
    table = names.mesh_table(cluster.name)
    for family in egress.families(cluster, item):
        address = egress.source(node, item, family)
        for prefix in of_family(item.pods, family) if address is not None else ():
            yield NftElement(table, f"let_out{WORDS[family].suffix}", prefix.bare)
            yield NftElement(table, _own_map("leaving", item, family), prefix.bare, address or "")


def chosen(cluster: Cluster, item: EgressPolicy) -> Iterator[PlanObject]:
    """A policy's pods on all nodes: what comes to them by the overlay answers them, or is none of theirs."""
    table, chain, rules = names.mesh_table(cluster.name), f"back.{item.name}", list[Rule]()
    for family in egress.families(cluster, item):
        words = WORDS[family]
        rules.append((*_narrowed(item, family, words.source), *drops.NO_ANSWER))
        for prefix in of_family(item.pods, family):
            yield NftElement(table, f"chosen{words.suffix}", prefix.bare, f"jump {chain}")
    yield NftChain(table, chain, tuple(rules) if item.destinations else (drops.NO_ANSWER,))


def destinations(cluster: Cluster, item: EgressPolicy) -> Iterator[PlanObject]:
    """The destinations of a policy that has some, and what is asked for them only."""
    table = names.mesh_table(cluster.name)
    for family in egress.families(cluster, item) if item.destinations else ():
        name, words = _destinations(item, family), WORDS[family]
        yield NftSet(table, name, words.type, interval=True)
        yield from (NftElement(table, name, prefix.bare) for prefix in of_family(item.destinations, family))


def own_maps(cluster: Cluster, item: EgressPolicy, which: str) -> Iterator[PlanObject]:
    """The map of a policy that has destinations of its own, for its pods as they are ``kept``, or as they are ``leaving``."""
    for family in egress.families(cluster, item) if item.destinations else ():
        words = WORDS[family]
        kept = which == "kept"
        yield NftSet(
            names.mesh_table(cluster.name), _own_map(which, item, family), words.type, words.type, interval=True, value_interval=kept
        )


def checked(link: str) -> Sysctl:
    """What comes out of the overlay from outside would fail a strict check of reverse paths."""
    return Sysctl(f"net/ipv4/conf/{link}/rp_filter", "2")


def _sets(cluster: Cluster, role: Role, table: str, family: Family) -> Iterator[PlanObject]:
    words = WORDS[family]
    yield NftSet(table, f"pods{words.suffix}", words.type, interval=True)
    yield from (NftElement(table, f"pods{words.suffix}", prefix.bare) for prefix in of_family(cluster.pod_prefixes, family))
    yield NftSet(table, f"inside{words.suffix}", words.type, interval=True)
    yield from (NftElement(table, f"inside{words.suffix}", prefix.bare) for prefix in of_family(role.inside, family))
    yield NftSet(table, f"hosts{words.suffix}", words.type)
    yield from host(cluster, (address for address in role.hosts if address.family == family))
    yield NftSet(table, f"led{words.suffix}", words.type, "verdict", interval=True)
    yield NftSet(table, f"chosen{words.suffix}", words.type, "verdict", interval=True)
    yield NftSet(table, f"kept{words.suffix}", words.type, words.type, interval=True, value_interval=True)
    yield NftSet(table, f"let_out{words.suffix}", words.type, interval=True)
    yield NftSet(table, f"leaving{words.suffix}", words.type, words.type, interval=True)


def _steer(cluster: Cluster, role: Role) -> Iterator[Rule]:
    families = mesh.pod_families(cluster)
    if role.is_exit and cluster.routing == "native":
        for family in families:
            words = WORDS[family]
            back = SetMark(egress.mark(cluster.marks, 0), cluster.marks.mask)
            yield (_REPLY, Match(words.destination, (f"@pods{words.suffix}",)), *_outside(family, words.source), back)
    # What was led here by another node is for this one to let out, or for nobody.
    yield (_FROM_OVERLAY, _RETURN)
    yield (_REPLY, _RETURN)
    yield (Match("fib daddr type", ("local",)), _RETURN)
    for family in families:
        words = WORDS[family]
        yield (*_outside(family, words.destination), VerdictMap(words.source, f"led{words.suffix}"))


def _forward(cluster: Cluster) -> Iterator[Rule]:
    yield (_BY_OVERLAY, Match("tcp flags & (syn | rst)", ("syn",)), ClampMss())
    yield (_FROM_OVERLAY, _REPLY, _RETURN)
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        yield (_FROM_OVERLAY, _ORIGINAL, *_outside(family, words.source), VerdictMap(words.destination, f"chosen{words.suffix}"))
        stranger = Match(words.source, (f"@let_out{words.suffix}",), "!=")
        yield (_FROM_OVERLAY, *_outside(family, words.destination), stranger, *drops.NOT_LET_OUT)


def _closed(cluster: Cluster) -> Iterator[Rule]:
    """What is led to an exit node leaves by the overlay, or not at all."""
    marks = cluster.marks
    others = (0, marks.encrypt, marks.encrypted, marks.decrypted, egress.mark(marks, 0))
    led_away = Match("meta mark", tuple(f"{value:#x}" for value in others), "!=", marks.mask)
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        yield (_NOT_BY_OVERLAY, led_away, Match(words.source, (f"@pods{words.suffix}",)), *drops.NOT_BY_EXIT)


def _nat(cluster: Cluster, role: Role) -> Iterator[Rule]:
    """Pods' own addresses stay up to the exit node, whatever the CNI does to what leaves the cluster; there, it is the policy's."""
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        for item in role.let_out:
            if family in egress.families(cluster, item):
                yield (
                    _NOT_BY_OVERLAY,
                    *_narrowed(item, family),
                    Nat("snat", _own_map("leaving", item, family), prefix=False, family=family),
                )
        leaving = Nat("snat", f"leaving{words.suffix}", prefix=False, family=family)
        yield (_NOT_BY_OVERLAY, *_outside(family, words.destination), leaving)
        for item in role.led:
            if family in egress.families(cluster, item):
                yield (_BY_OVERLAY, *_narrowed(item, family), Nat("snat", _own_map("kept", item, family), family=family))
        yield (_BY_OVERLAY, *_outside(family, words.destination), Nat("snat", f"kept{words.suffix}", family=family))


def _leave(cluster: Cluster, role: Role) -> Iterator[Rule]:
    marks = cluster.marks
    if not role.is_meant:
        # The outer packet is looked up with what the inner one bears. On a node that encrypts, it is marked for that.
        yield (_BY_OVERLAY, SetMark(0, marks.mask))
    if role.is_exit and cluster.routing == "native":
        answer = Match("meta mark", (f"{egress.mark(marks, 0):#x}",), mask=marks.mask)
        yield (_NOT_BY_OVERLAY, answer, SetMark(0, marks.mask))


def _outside(family: Family, selector: str) -> tuple[Match, Match]:
    """What is of nobody in the cluster, nor of its peers."""
    suffix = WORDS[family].suffix
    return (Match(selector, (f"@inside{suffix}",), "!="), Match(selector, (f"@hosts{suffix}",), "!="))  # type: ignore[arg-type]


def _narrowed(item: EgressPolicy, family: Family, selector: str = "") -> tuple[Match, ...]:
    """A match of where a packet goes, or of the address that `selector` says, on a policy's destinations, where it has some."""
    at = selector or WORDS[family].destination
    return (Match(at, (f"@{_destinations(item, family)}",)),) if item.destinations else ()  # type: ignore[arg-type]


def _destinations(item: EgressPolicy, family: Family) -> str:
    return f"to.{item.name}.{family}"


def _own_map(which: str, item: EgressPolicy, family: Family) -> str:
    """The map that holds a policy's pods: its own where it has destinations, else that of all."""
    return f"{which}.{item.name}.{family}" if item.destinations else f"{which}{WORDS[family].suffix}"


def inside(cluster: Cluster, seen: Sequence[Prefix]) -> tuple[Prefix, ...]:
    """What no policy leads away: all of the cluster, what it sees of peers, broker and management, and what is never routed."""
    never = [Prefix(prefix) for prefix in layout.RESERVED]
    found = {*cluster.pod_prefixes, *cluster.external_prefixes, *cluster.internal_prefixes, *cluster.control, *seen, *never}
    return tuple(sorted(prefix for prefix in found if not any(prefix != other and other.contains(prefix) for other in found)))
