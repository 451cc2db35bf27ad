"""Which tracked flows contradict a change of NAT. Pure.

Connection tracking decides the translation of a flow once, at its first packet: a flow that began before its translation was loaded stays
untranslated until its entry is gone. Flows are matched by the prefixes of the changed elements that NAT rules look up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from schemas.nft import Match, Nat
from schemas.plan import NftChain, NftElement, PlanObject
from schemas.values import Prefix
from services.kernel.port import Flow
from services.kernel.transaction import Change


def stale_flows(changes: Sequence[Change], objects: Mapping[str, PlanObject], flows: Iterable[Flow]) -> list[Flow]:
    """The flows whose translation is decided by an element that was added, changed or removed. `objects` holds the chains."""
    sources, destinations = _changed_prefixes(changes, objects)
    if not sources and not destinations:
        return []
    return [
        flow
        for flow in flows
        if any(prefix.covers(flow.destination) for prefix in destinations) or any(prefix.covers(flow.source) for prefix in sources)
    ]


def touches_nat(changes: Sequence[Change], objects: Mapping[str, PlanObject]) -> bool:
    """True when the changes can have made flows stale at all."""
    return any(_changed_prefixes(changes, objects))


def _changed_prefixes(changes: Sequence[Change], objects: Mapping[str, PlanObject]) -> tuple[set[Prefix], set[Prefix]]:
    deciding = dict(_deciding_sets([*objects.values(), *(change.old for change in changes if isinstance(change.old, NftChain))]))
    sources: set[Prefix] = set()
    destinations: set[Prefix] = set()
    for change in changes:
        item = change.subject
        if isinstance(item, NftElement) and (side := deciding.get((item.table, item.set))):
            (destinations if side == "destination" else sources).add(Prefix.parse(item.element))
    return sources, destinations


def _deciding_sets(objects: Iterable[PlanObject]) -> Iterator[tuple[tuple[str, str], str]]:
    """The sets and maps that decide a translation, and which address of a flow they look up.

    Where a rule narrows by destination first (``ip daddr @remote snat …``), the destination set decides: a change of the sources must
    not cut flows to elsewhere.
    """
    for chain in [item for item in objects if isinstance(item, NftChain) and item.type == "nat"]:
        for rule in chain.rules:
            nat = next((statement for statement in rule if isinstance(statement, Nat)), None)
            if nat is None:
                continue
            narrowed = [
                value.removeprefix("@")
                for statement in rule
                if isinstance(statement, Match) and statement.selector == "ip daddr"
                for value in statement.values
                if value.startswith("@")
            ]
            if narrowed:
                yield from (((chain.table, name), "destination") for name in narrowed)
            else:
                yield (chain.table, nat.map), "destination" if nat.nat == "dnat" else "source"
