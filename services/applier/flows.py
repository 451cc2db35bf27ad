"""Which tracked flows contradict the NAT that is wanted. Pure.

Connection tracking decides the translation of a flow once, at its first packet: a flow that began before its translation was loaded stays
as it was until its entry is gone. Every flow is judged by what the wanted maps say of its addresses, so nothing is missed after a crash
and no flow is dropped that is right. Flows of translations that are removed are judged by the removed elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from schemas.host_objects import NftChain, NftElement, PlanObject
from schemas.nft import Match, Nat, Rule
from schemas.values import Address, Prefix
from services.kernel.port import Flow
from services.kernel.transaction import Change, Held

_BY_DESTINATION = ("ip daddr", "ip6 daddr")


_Elements = dict[tuple[str, str], list[tuple[Prefix, str]]]
"""What sets and maps hold, by table and name: keys with their values."""


class Translation(NamedTuple):
    """One NAT rule: which sets narrow it by destination (names; none: all flows), and the map that it looks an address up in.

    It spares destinations in the sets `spared_by`.
    `way` is what it asks of the packet's mark. A rule that follows translates single sources of one way, whatever their destination:
    what it says counts only for flows that are known to go that way, by the destination's rule.
    `link` is what it asks of the link by which a packet leaves, which no flow tells.
    """

    kind: str
    table: str
    narrowed_by: tuple[str, ...]
    map: str
    way: tuple[Match, ...]
    follows: bool
    spared_by: tuple[str, ...] = ()
    link: tuple[Match, ...] = ()


def touches_nat(changes: Sequence[Change], objects: Mapping[str, PlanObject]) -> bool:
    """True when the changes can have made flows stale at all."""
    deciding = _deciding([*_translations(objects.values()), *_former(changes)])
    return any(isinstance(item := change.subject, NftElement) and (item.table, item.set) in deciding for change in changes)


def stale_flows(changes: Sequence[Change], objects: Mapping[str, PlanObject], flows: Iterable[Flow]) -> list[Flow]:
    """The flows whose translation is not the one that `objects`, all that is wanted, lead to, or whose translation `changes` remove."""
    rules = _translations(objects.values())
    deciding = _deciding(rules)
    elements: _Elements = {}
    for item in objects.values():
        if isinstance(item, NftElement) and (item.table, item.set) in deciding:
            elements.setdefault((item.table, item.set), []).append((_prefix(item.element), item.value))
    judges = [_Judge(rule, elements) for rule in sorted(rules, key=lambda rule: rule.kind)]
    gone, former = _removed(changes, rules, elements), _former_judges(changes, rules, elements)
    return [
        flow
        for flow in flows
        if _contradicts(flow, judges)
        or any(prefix.covers(flow.destination) for prefix in gone)
        or any(judge.verdict(flow) for judge in former)
    ]


class _Members:
    """The elements of some sets or of a map, asked for the one that holds an address."""

    def __init__(self, elements: Iterable[tuple[Prefix, str]]) -> None:
        members = list(elements)
        self._prefixes = [(prefix, value) for prefix, value in members if prefix.size > 1]
        self._single = {prefix.bare: (prefix, value) for prefix, value in members if prefix.size == 1}
        """Apart, since there may be many, and there are many flows."""

    def find(self, address: Address) -> tuple[Prefix, str] | None:
        known = self._single.get(address)
        return known or next((member for member in self._prefixes if member[0].covers(address)), None)


class _Judge:
    """What one NAT rule says of a flow: the address that the reply must have, or None when the rule does not concern it."""

    def __init__(self, rule: Translation, elements: _Elements) -> None:
        self.kind, self.way, self.link, self.follows = rule.kind, rule.way, rule.link, rule.follows
        self._members = _Members(elements.get((rule.table, rule.map), []))
        self._narrowed = _Members(_all(rule.table, rule.narrowed_by, elements)) if rule.narrowed_by else None
        self._spared = _Members(_all(rule.table, rule.spared_by, elements))

    def verdict(self, flow: Flow) -> bool | None:
        """True when the flow is right, False when it contradicts the rule, None when the rule does not concern it."""
        if self._narrowed is not None and not self._narrowed.find(flow.destination):
            return None
        if self._spared.find(flow.destination):
            return None
        address, reply = (flow.destination, flow.reply_source) if self.kind == "dnat" else (flow.source, flow.reply_destination)
        found = self._members.find(address)
        return bool(reply == _translated(found[0], address, found[1])) if found is not None else None


def _contradicts(flow: Flow, judges: Sequence[_Judge]) -> bool:
    """The first rule that concerns a flow decides, destinations first: a flow that goes one way is none of the other's.

    Where the destination is right, the source must be as the rules of the same way want it. Where rules are for packets that leave by one
    link or another, a flow is right that is so by any: while an egress policy moves, a node lets some of its pods out and leads others.
    """
    for judge in judges:
        found = None if judge.follows else judge.verdict(flow)
        if found is not None:
            found = found or any(other.link != judge.link and other.kind == judge.kind and other.verdict(flow) for other in judges)
            along = [other for other in judges if judge.kind == "dnat" and other.kind == "snat" and judge.way and other.way == judge.way]
            return not found or any(other.verdict(flow) is False for other in along)
    return False


def _all(table: str, names: Iterable[str], elements: _Elements) -> Iterable[tuple[Prefix, str]]:
    return (member for name in names for member in elements.get((table, name), []))


def _translated(prefix: Prefix, address: Address, value: str) -> Address:
    onto = _prefix(value)
    return prefix.translate(address, onto) if onto.length == prefix.length else Address(value)


def _former(changes: Sequence[Change]) -> list[Translation]:
    """The NAT rules of chains that are changed or removed, as they were."""
    return _translations(change.old for change in changes if isinstance(change.old, NftChain))


def _former_judges(changes: Sequence[Change], rules: Sequence[Translation], elements: _Elements) -> list[_Judge]:
    """What removed elements said of sources: flows that are as they said would go on by another way under what is no address of theirs."""
    senders = [rule for rule in dict.fromkeys((*rules, *_former(changes))) if rule.kind == "snat" and not rule.follows]
    removed: _Elements = {}
    for change in changes:
        item = change.old
        if change.new is None and isinstance(item, NftElement) and (prefix := _foreign_prefix(item.element)) is not None:
            removed.setdefault((item.table, item.set), []).append((prefix, item.value))
    found = []
    for rule in senders:
        if members := removed.get((rule.table, rule.map)):
            around = {
                (rule.table, name): [*elements.get((rule.table, name), []), *removed.get((rule.table, name), [])]
                for name in (*rule.narrowed_by, *rule.spared_by)
            }
            found.append(_Judge(rule, {**around, (rule.table, rule.map): members}))
    return found


def _removed(changes: Sequence[Change], rules: Sequence[Translation], elements: _Elements) -> list[Prefix]:
    """Destinations that were translated and are not any more."""
    deciding = {(rule.table, rule.map) for rule in rules if rule.kind == "dnat"}
    kept = {prefix for key in deciding for prefix, _ in elements.get(key, [])}
    gone = [change.old for change in changes if change.new is None and isinstance(change.old, NftElement)]
    prefixes = [_foreign_prefix(item.element) for item in gone if (item.table, item.set) in deciding]
    return [prefix for prefix in prefixes if prefix is not None and prefix not in kept]


def _foreign_prefix(text: str) -> Prefix | None:
    """What is removed may have been put there by anybody, in any form; a range is no translation of ours."""
    try:
        return _prefix(text)
    except ValueError:
        return None


def _deciding(rules: Iterable[Translation]) -> set[tuple[str, str]]:
    """Table and name of every set and map that decides a translation."""
    return {(rule.table, name) for rule in rules for name in (*rule.narrowed_by, *rule.spared_by, rule.map)}


def _translations(objects: Iterable[Held]) -> list[Translation]:
    chains = [item for item in objects if isinstance(item, NftChain) and item.type == "nat"]
    return [found for chain in chains for rule in chain.rules if (found := _translation(chain.table, rule)) is not None]


def _translation(table: str, rule: Rule) -> Translation | None:
    nat = next((statement for statement in rule if isinstance(statement, Nat)), None)
    if nat is None:
        return None
    by_destination = [statement for statement in rule if isinstance(statement, Match) and statement.selector in _BY_DESTINATION]
    names, spared = (
        tuple(value.removeprefix("@") for match in by_destination for value in match.values if match.op == op and value.startswith("@"))
        for op in ("==", "!=")
    )
    way, link = (
        tuple(statement for statement in rule if isinstance(statement, Match) and statement.selector == selector)
        for selector in ("meta mark", "oifname")
    )
    return Translation(nat.nat, table, names, nat.map, way, nat.nat == "snat" and not nat.prefix and not (names or spared), spared, link)


def _prefix(text: str) -> Prefix:
    return Prefix.parse(text)
