"""Pass-through objects: which hosts they select, and what they put there.

Each object is a unit of its own on every host that it selects, so that one that cannot be applied holds nothing else up. A new kind is a
module with its objects, and a line in `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from schemas.firewall import FirewallConfiguration
from schemas.host_objects import PlanObject
from schemas.objects import HostSelector, PassThrough
from schemas.plan import Entry, SummedUnit
from schemas.routing import RouteConfiguration
from schemas.topology import Gateway, Node
from services.planner.allocate import Allocations
from services.planner.compile import firewall, routing
from services.planner.compile.facts import Facts
from services.planner.state import HostId, State


class _Builder(NamedTuple):
    """The first word of a kind's units, what an object of the kind looks at on a host, and what it is where that is known."""

    word: str
    facts: Callable[[Any, HostId, State, Allocations], Facts]
    build: Callable[[Any, Facts], Iterator[PlanObject]]


_BUILDERS: dict[type[PassThrough], _Builder] = {
    FirewallConfiguration: _Builder("firewall", firewall.facts, firewall.build),
    RouteConfiguration: _Builder("route", routing.facts, routing.build),
}


class _Made(NamedTuple):
    """The units that were made of an object, by facts."""

    item: PassThrough
    units: dict[Facts, SummedUnit]


class Passing:
    """The units of pass-through objects. Hosts of equal facts share them: a long list costs a thousand hosts what it costs one."""

    def __init__(self, state: State, allocations: Allocations) -> None:
        self._state = state
        self._allocations = allocations
        self._made: dict[str, _Made] = {}

    def unit(self, ref: str, host: HostId) -> SummedUnit | None:
        """What an object puts on a host; None when it is not there or does not select the host."""
        known, item = self._state.host(host), self._state.passing[host.cluster].get(ref)
        if item is None:
            self._made.pop(ref, None)
            return None
        if known is None or not selected(item.hosts, known, self._state):
            return None
        builder = _BUILDERS[type(item)]
        facts = builder.facts(item, host, self._state, self._allocations)
        made = self._made.get(ref)
        if made is None or made.item is not item:
            made = self._made[ref] = _Made(item, {})
        if facts not in made.units:
            because = tuple(sorted((item.ref, *facts.because)))
            made.units[facts] = SummedUnit.of(Entry(found, because) for found in builder.build(item, facts))
        return made.units[facts]

    def units(self, host: HostId) -> Iterator[tuple[str, SummedUnit]]:
        """All units of a host, by name."""
        for item in self._state.passing[host.cluster].values():
            if (unit := self.unit(item.ref, host)) is not None:
                yield unit_name(item), unit


def unit_name(item: PassThrough) -> str:
    return f"{_BUILDERS[type(item)].word}/{item.cluster}/{item.name}"


def selected(selector: HostSelector, host: Node | Gateway, state: State) -> bool:
    """Whether a host of the object's cluster is meant."""
    return selects(selector, host, _peerings(host, state))


def selects(selector: HostSelector, host: Node | Gateway, peerings: Container[str]) -> bool:
    """The same for a host that takes part in these peerings."""
    role = "gateway" if isinstance(host, Gateway) else "node"
    by_name = not selector.names or any(fnmatchcase(host.name, pattern) for pattern in selector.names)
    by_peering = selector.peering is None or selector.peering in peerings
    return by_name and by_peering and selector.role in (None, role)


def may_meet(one: HostSelector, other: HostSelector) -> bool:
    """Whether there can be a host that both selectors fit."""
    roles = {one.role, other.role} - {None}
    # A gateway takes part in one peering, a node in all of its cluster.
    apart = one.peering is not None and other.peering is not None and one.peering != other.peering and "gateway" in roles
    names = ((mine, theirs) for mine in one.names or ("*",) for theirs in other.names or ("*",))
    return len(roles) < 2 and not apart and any(_patterns_meet(mine, theirs) for mine, theirs in names)  # noqa: PLR2004 - there are two roles


@lru_cache(maxsize=4096)
def _patterns_meet(one: str, other: str) -> bool:
    """Whether there is a name that both patterns fit."""
    if not one or not other:
        return not (one or other).strip("*")
    if one[0] == "*" or other[0] == "*":
        star, rest = (one, other) if one[0] == "*" else (other, one)
        return _patterns_meet(star[1:], rest) or _patterns_meet(star, rest[1:])
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _patterns_meet(one[1:], other[1:])


def _peerings(host: Node | Gateway, state: State) -> set[str]:
    """Names of the peerings that a host takes part in."""
    attachments = state.attachments[host.cluster]
    taking_part = attachments.values() if isinstance(host, Node) else filter(None, [attachments.get(host.name)])
    return {attachment.peering.name for attachment in taking_part}
