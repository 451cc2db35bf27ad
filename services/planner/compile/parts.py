"""Which parts a host's plan has, which topology objects each depends on, and the plans put together.

A part is named by (unit, contributing object). Compiling a host is building all its parts; following a change is building again the parts
that the changed object touches. Both give the same plan (a property test holds them together).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.plan import Entry, HostPlan, PlanObject, SummedUnit
from schemas.topology import DriftPolicy, Gateway, Node, Pod, Topology
from schemas.values import Name
from services.planner.allocate import Allocations
from services.planner.compile import gateway, node
from services.planner.state import Attachment, HostId, State


class PartId(NamedTuple):
    """A part of a unit: what the object `source` contributes to it (empty: what all the rest rests on)."""

    unit: str
    source: str


Part = SummedUnit
"""The entries of a part, by key. No key stands in two parts of a unit."""


def unit_name(attachment: Attachment) -> str:
    return f"peering/{attachment.peering.cluster}/{attachment.peering.name}"


class Compiler:
    """Keeps the parts of every host, and follows changes of the state at the cost of what they touch."""

    def __init__(self, state: State, allocations: Allocations) -> None:
        self._state = state
        self._allocations = allocations
        self._parts: dict[HostId, dict[PartId, Part]] = {}
        self._plans: dict[HostId, HostPlan] = {}

    def refresh(self, changed: Iterable[Topology]) -> set[HostId]:
        """Build again what these objects touch, in the state as it is now; returns the hosts concerned.

        A changed object is given in its old and its new form.
        """
        whole: set[HostId] = set()
        single: dict[HostId, set[str]] = {}
        for item in changed:
            if isinstance(item, Pod):
                for attachment in self._state.attachments[item.cluster].values():
                    single.setdefault(attachment.host, set()).add(item.ref)
            elif isinstance(item, Node):
                whole.add(HostId(item.cluster, item.name))
                touched = {
                    item.ref,
                    *(f"Endpoint/{item.cluster}/{pod}" for pod in self._state.pods_by_node[HostId(item.cluster, item.name)]),
                }
                for attachment in self._state.attachments[item.cluster].values():
                    single.setdefault(attachment.host, set()).update(touched)
            else:
                whole.update(_neighbourhood(self._state, item))
        for host in whole:
            self._replace(host, _all_parts(self._state, self._allocations, host))
        for host in single.keys() - whole:
            self._update(host, single[host])
        for host in whole | single.keys():
            self._plans.pop(host, None)
        return whole | single.keys()

    def plan(self, host: HostId) -> HostPlan:
        """The host's plan as the last refresh left it; without units when it has none."""
        if host not in self._plans:
            self._plans[host] = self._merged(host)
        return self._plans[host]

    def _merged(self, host: HostId) -> HostPlan:
        entries: dict[str, dict[str, Entry]] = {}
        totals: dict[str, int] = {}
        for part_id, part in self._parts.get(host, {}).items():
            entries.setdefault(part_id.unit, {}).update(part)
            totals[part_id.unit] = totals.get(part_id.unit, 0) + part.total
        units = {name: SummedUnit(unit, totals[name]) for name, unit in entries.items()}
        cluster = self._state.clusters.get(host.cluster)
        return HostPlan(Name(host.cluster), Name(host.name), units, cluster.drift if cluster else DriftPolicy())

    def _replace(self, host: HostId, parts: dict[PartId, Part]) -> None:
        if parts:
            self._parts[host] = parts
        else:
            self._parts.pop(host, None)

    def _update(self, host: HostId, sources: set[str]) -> None:
        parts = self._parts.setdefault(host, {})
        attachment = self._state.attachments[host.cluster].get(host.name)
        if attachment is None:
            return
        for source in sources:
            part = _gateway_part(self._state, self._allocations, attachment, source)
            if part:
                parts[PartId(unit_name(attachment), source)] = part
            else:
                parts.pop(PartId(unit_name(attachment), source), None)


def compile_host(state: State, allocations: Allocations, host: HostId) -> HostPlan:
    """The whole plan of one host."""
    compiler = Compiler(state, allocations)
    compiler._replace(host, _all_parts(state, allocations, host))
    return compiler.plan(host)


def compile_all(state: State, allocations: Allocations) -> dict[HostId, HostPlan]:
    """The plans of all hosts."""
    return {host: compile_host(state, allocations, host) for host in state.hosts()}


def _neighbourhood(state: State, item: Topology) -> Iterator[HostId]:
    """Hosts that an object other than a pod or node may touch: all of its clusters, and the far gateways."""
    clusters = {item.home, *(end.cluster for end in getattr(item, "ends", ()))}
    for cluster in clusters:
        yield from state.hosts_of(cluster)
        yield from (attachment.far_host for attachment in state.attachments[cluster].values())
    if isinstance(item, Gateway):
        yield HostId(item.cluster, item.name)


def _all_parts(state: State, allocations: Allocations, host: HostId) -> dict[PartId, Part]:
    known = state.host(host)
    parts: dict[PartId, Part] = {}
    if isinstance(known, Node):
        for attachment in state.attachments[host.cluster].values():
            if attachment.end.gateway in state.gateways[host.cluster]:
                made = _entries(node.base(state, allocations, attachment, known), _because(state, attachment, known))
                parts[PartId(unit_name(attachment), "")] = made
    attachment_here = state.attachments[host.cluster].get(host.name)
    if isinstance(known, Gateway) and attachment_here is not None:
        sources = [
            "",
            *(item.ref for item in state.nodes[host.cluster].values()),
            *(item.ref for item in state.pods[host.cluster].values()),
        ]
        for source in sources:
            if part := _gateway_part(state, allocations, attachment_here, source):
                parts[PartId(unit_name(attachment_here), source)] = part
    return parts


def _gateway_part(state: State, allocations: Allocations, attachment: Attachment, source: str) -> Part:
    item = state.objects.get(source)
    match item:
        case Node():
            return _entries(gateway.node(state, allocations, attachment, item), _because(state, attachment, item))
        case Pod():
            because = (f"Node/{item.cluster}/{item.node}", item.ref, attachment.peering.ref)
            return _entries(gateway.pod(state, allocations, item), because)
        case _ if source == "":
            return _entries(gateway.base(state, allocations, attachment), _because(state, attachment))
    return SummedUnit({}, 0)


def _because(state: State, attachment: Attachment, *more: Topology) -> tuple[str, ...]:
    ends = attachment.peering.ends
    refs = [attachment.peering.ref, *(f"Cluster/{end.cluster}/{end.cluster}" for end in ends)]
    refs += [f"Gateway/{end.cluster}/{end.gateway}" for end in ends]
    refs += [state.keys[host].ref for host in (attachment.host, attachment.far_host) if host in state.keys and not more]
    return (*refs, *(item.ref for item in more))


def _entries(objects: Iterable[PlanObject], because: Iterable[str]) -> Part:
    refs = tuple(sorted(because))
    return SummedUnit.of(Entry(item, refs) for item in objects)
