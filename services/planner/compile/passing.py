"""Pass-through objects: which hosts they select, and what they put there.

Each object is a unit of its own on every host that it selects, so that one that cannot be applied holds nothing else up. A new kind is a
module with its objects, and a line in `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from schemas.firewall import FirewallConfiguration
from schemas.objects import HostSelector, PassThrough
from schemas.plan import PlanObject
from schemas.topology import Gateway, Node
from services.planner.allocate import Allocations
from services.planner.compile import firewall
from services.planner.state import HostId, State

Build = Callable[[Any, HostId, State, Allocations], Iterator[PlanObject]]


class _Builder(NamedTuple):
    """The first word of a kind's units, and what makes a host's objects of an object of the kind."""

    word: str
    build: Build


_BUILDERS: dict[type[PassThrough], _Builder] = {FirewallConfiguration: _Builder("firewall", firewall.build)}


def unit_name(item: PassThrough) -> str:
    return f"{_BUILDERS[type(item)].word}/{item.cluster}/{item.name}"


def objects(item: PassThrough, host: HostId, state: State, allocations: Allocations) -> Iterator[PlanObject]:
    """What the object is on a host that it selects."""
    return _BUILDERS[type(item)].build(item, host, state, allocations)


def selected(selector: HostSelector, host: Node | Gateway, state: State) -> bool:
    """Whether a host of the object's cluster is meant."""
    return selects(selector, host, _peerings(host, state))


def selects(selector: HostSelector, host: Node | Gateway, peerings: Container[str]) -> bool:
    """The same for a host that takes part in these peerings."""
    role = "gateway" if isinstance(host, Gateway) else "node"
    by_name = not selector.names or any(fnmatchcase(host.name, pattern) for pattern in selector.names)
    by_peering = selector.peering is None or selector.peering in peerings
    return by_name and by_peering and selector.role in (None, role)


def because(item: PassThrough, host: Node | Gateway, state: State) -> tuple[str, ...]:
    """The topology objects that a host's objects come from."""
    serves = state.attachments[host.cluster].get(host.name)
    return (item.ref, host.ref, *([serves.peering.ref] if serves is not None and isinstance(host, Gateway) else []))


def _peerings(host: Node | Gateway, state: State) -> set[str]:
    """Names of the peerings that a host takes part in."""
    attachments = state.attachments[host.cluster]
    taking_part = attachments.values() if isinstance(host, Node) else filter(None, [attachments.get(host.name)])
    return {attachment.peering.name for attachment in taking_part}
