"""Which parts a host's plan has, which topology objects each depends on, and the plans put together.

A part is named by (unit, contributing object). Compiling a host is building all its parts; following a change is building again the parts
that the changed object touches. Both give the same plan (a property test holds them together).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.objects import PassThrough
from schemas.plan import Entry, HostPlan, SummedUnit, mesh_unit
from schemas.topology import DriftPolicy, EgressPolicy, Gateway, IpMapping, Node, Pod, PublicKey, Topology
from schemas.values import Name
from services.planner.allocate import Allocations
from services.planner.compile import gateway, mapping, node
from services.planner.compile.mesh import Meshes
from services.planner.compile.passing import Passing
from services.planner.compile.passing import unit_name as passed_unit_name
from services.planner.mappings import is_pods, leaders_around, leading_node, led_by
from services.planner.state import Attachment, HostId, State


class PartId(NamedTuple):
    """A part of a unit: what the object `source` contributes to it (empty: what all the rest rests on)."""

    unit: str
    source: str


Part = SummedUnit
"""The entries of a part, by key. No key stands in two parts of a unit."""
_NOTHING = SummedUnit({}, 0)


def unit_name(attachment: Attachment) -> str:
    return f"peering/{attachment.peering.cluster}/{attachment.peering.name}"


class Compiler:
    """Keeps the parts of every host, and follows changes of the state at the cost of what they touch."""

    def __init__(self, state: State, allocations: Allocations) -> None:
        self._state = state
        self._allocations = allocations
        self._passing = Passing(state, allocations)
        self._meshes = Meshes(state, allocations)
        self._parts: dict[HostId, dict[PartId, Part]] = {}
        self._units: dict[HostId, dict[str, SummedUnit]] = {}

    def refresh(self, changed: Iterable[Topology]) -> set[HostId]:
        """Build again what these objects touch, in the state as it is now; returns the hosts concerned.

        A changed object is given in its old and its new form.
        """
        whole: set[HostId] = set()
        single: dict[HostId, set[PartId]] = {}
        passed: set[HostId] = set()
        meshed: dict[str, set[str]] = {}
        for item in changed:
            touched = self._meshes.touched(item)
            meshed.setdefault(item.home, set()).update(touched.sources)
            whole.update(HostId(item.home, name) for name in touched.nodes)
            match item:
                case PassThrough():
                    passed.update(host for host in self._state.hosts_of(item.cluster) if self._pass(host, item))
                case Pod() | Node() | IpMapping():
                    whole.update(_whole(self._state, item))
                    sources = _sources(self._state, item)
                    for attachment in self._state.attachments[item.cluster].values():
                        places = (PartId(unit_name(attachment), source) for source in sources)
                        single.setdefault(attachment.host, set()).update(places)
                case PublicKey():
                    whole.update(_with_key(self._state, item))
                case _:
                    whole.update(_neighbourhood(self._state, item))
        for cluster, sources in meshed.items():
            for name in self._state.nodes[cluster] if sources else ():
                single.setdefault(HostId(cluster, name), set()).update(PartId(mesh_unit(cluster), source) for source in sources)
        for host in whole:
            self.rebuild(host)
        for host in single.keys() - whole:
            self._update(host, single[host])
        return whole | single.keys() | passed

    def turn(self, host: HostId) -> set[HostId]:
        """Build again what a host's change of keys touches: a node, and what others of its cluster hold for it; or both gateways."""
        attachment = self._state.attachments[host.cluster].get(host.name)
        if attachment is not None:
            return {self._turn_tunnels(end) for end in (attachment.host, attachment.far_host)}
        sources = self._meshes.turned(host)
        others = {HostId(host.cluster, name) for name in self._state.nodes[host.cluster]} - {host}
        for other in others:
            self._update(other, {PartId(mesh_unit(host.cluster), source) for source in sources})
        self.rebuild(host)
        return {host, *others}

    def _turn_tunnels(self, host: HostId) -> HostId:
        """Build again what a gateway holds for its tunnels, and what is published for all of them."""
        attachment = self._state.attachments[host.cluster][host.name]
        self._update(host, [PartId(unit_name(attachment), "")])
        for item in self._state.passing[host.cluster].values():
            self._pass(host, item)
        return host

    def rebuild(self, host: HostId) -> None:
        """Build all parts of a host anew."""
        self._parts[host] = _all_parts(self._state, self._allocations, host)
        self._parts[host].update((PartId(mesh_unit(host.cluster), source), part) for source, part in self._meshes.parts(host))
        self._parts[host].update((PartId(name, ""), unit) for name, unit in self._passing.units(host))
        entries: dict[str, dict[str, Entry]] = {}
        totals: dict[str, int] = {}
        for part_id, part in self._parts[host].items():
            entries.setdefault(part_id.unit, {}).update(part)
            totals[part_id.unit] = totals.get(part_id.unit, 0) + part.total
        self._units[host] = {name: SummedUnit(unit, totals[name]) for name, unit in entries.items()}

    def plan(self, host: HostId) -> HostPlan:
        """The host's plan as the last refresh left it; without units when it has none."""
        cluster = self._state.clusters.get(host.cluster)
        drift = cluster.drift if cluster else DriftPolicy()
        return HostPlan(Name(host.cluster), Name(host.name), dict(self._units.get(host, {})), drift)

    def unit(self, host: HostId, name: str) -> SummedUnit | None:
        """One unit of the host's plan as the last refresh left it."""
        return self._units.get(host, {}).get(name)

    def _pass(self, host: HostId, item: PassThrough) -> bool:
        """Build a pass-through object's unit of a host anew; whether the host has, or had, such a unit."""
        place = PartId(passed_unit_name(item), "")
        parts, units = self._parts.setdefault(host, {}), self._units.setdefault(host, {})
        held = parts.pop(place, None)
        units.pop(place.unit, None)
        wanted = self._passing.unit(item.ref, host)
        if wanted is not None:
            parts[place] = units[place.unit] = wanted
        return held is not None or wanted is not None

    def _update(self, host: HostId, places: Iterable[PartId]) -> None:
        """Build single parts of a host anew, and carry what they change over into its units."""
        parts, units = self._parts.setdefault(host, {}), self._units.setdefault(host, {})
        put: dict[str, list[Entry]] = defaultdict(list)
        drop: dict[str, list[str]] = defaultdict(list)
        for place in places:
            before, after = parts.pop(place, _NOTHING), self._build(host, place)
            if after:
                parts[place] = after
            put[place.unit] += (entry for key, entry in after.items() if before.get(key) != entry)
            drop[place.unit] += before.keys() - after.keys()
        for name, entries in put.items():
            if entries or drop[name]:
                units[name] = units.get(name, _NOTHING).changed(entries, drop[name])
                if not units[name]:
                    del units[name]

    def _build(self, host: HostId, place: PartId) -> Part:
        if place.unit == mesh_unit(host.cluster):
            return self._meshes.part(host, place.source)
        attachment = self._state.attachments[host.cluster].get(host.name)
        return _gateway_part(self._state, self._allocations, attachment, place.source) if attachment is not None else _NOTHING


def compile_host(state: State, allocations: Allocations, host: HostId) -> HostPlan:
    """The whole plan of one host."""
    compiler = Compiler(state, allocations)
    compiler.rebuild(host)
    return compiler.plan(host)


def compile_all(state: State, allocations: Allocations) -> dict[HostId, HostPlan]:
    """The plans of all hosts."""
    return {host: compile_host(state, allocations, host) for host in state.hosts()}


def _sources(state: State, item: Pod | Node | IpMapping) -> set[str]:
    """The sources of the parts that such an object touches on gateways: itself, a node's pods, the mappings that it may lead to."""
    if not isinstance(item, Node):
        return {item.ref}
    pods = state.pods_by_node[HostId(item.cluster, item.name)]
    led = (each.ref for each in state.mappings[item.cluster] if not is_pods(state, each))
    return {item.ref, *(f"Endpoint/{item.cluster}/{pod}" for pod in pods), *led}


def _whole(state: State, item: Pod | Node | IpMapping) -> Iterator[HostId]:
    """The nodes that such an object touches."""
    match item:
        case Node():
            yield HostId(item.cluster, item.name)
            yield from (HostId(item.cluster, leader.name) for leader in leaders_around(state, item))
        case IpMapping() if item.cluster in state.clusters and (leader := leading_node(state, item)) is not None:
            yield HostId(item.cluster, leader.name)


def _neighbourhood(state: State, item: Topology) -> Iterator[HostId]:
    """Hosts that an object other than a pod or node may touch: all of its clusters, and of the clusters that these are joined with."""
    if isinstance(item, EgressPolicy):
        return  # the mesh says which hosts have a part in it
    clusters = {item.home, *(end.cluster for end in getattr(item, "ends", ()))}
    for cluster in clusters:
        yield from state.hosts_of(cluster)
        for attachment in state.attachments[cluster].values():
            # A peering without remaps shows this cluster's prefixes to every host of the far one.
            yield from state.hosts_of(attachment.far.cluster)
    if isinstance(item, Gateway):
        yield HostId(item.cluster, item.name)


def _with_key(state: State, item: PublicKey) -> Iterator[HostId]:
    """The hosts that a key touches as a whole: its own, and both ends of its tunnels."""
    yield HostId(item.cluster, item.name)
    attachment = state.attachments[item.cluster].get(item.name)
    yield from (attachment.host, attachment.far_host) if attachment is not None else ()


def _all_parts(state: State, allocations: Allocations, host: HostId) -> dict[PartId, Part]:
    known = state.host(host)
    parts: dict[PartId, Part] = {}
    if isinstance(known, Node):
        for attachment in state.attachments[host.cluster].values():
            if attachment.end.gateway in state.gateways[host.cluster]:
                made = _entries(node.base(state, allocations, attachment, known), _because(attachment, known))
                parts[PartId(unit_name(attachment), "")] = made
                for item in led_by(state, known):
                    because = _because(attachment, known, item)
                    parts[PartId(unit_name(attachment), item.ref)] = _entries(mapping.on_node(state, attachment, item), because)
    attachment_here = state.attachments[host.cluster].get(host.name)
    if isinstance(known, Gateway) and attachment_here is not None:
        sources = [
            "",
            *(item.ref for item in state.nodes[host.cluster].values()),
            *(item.ref for item in state.pods[host.cluster].values()),
            *(item.ref for item in state.mappings[host.cluster]),
        ]
        for source in sources:
            if part := _gateway_part(state, allocations, attachment_here, source):
                parts[PartId(unit_name(attachment_here), source)] = part
    return parts


def _gateway_part(state: State, allocations: Allocations, attachment: Attachment, source: str) -> Part:
    item = state.objects.get(source)
    match item:
        case Node():
            return _entries(gateway.node(state, allocations, attachment, item), _because(attachment, item))
        case Pod():
            because = (f"Node/{item.cluster}/{item.node}", item.ref, attachment.peering.ref)
            return _entries(gateway.pod(state, allocations, attachment, item), because)
        case IpMapping():
            leader = None if is_pods(state, item) else leading_node(state, item)
            refs = _because(attachment, item, *([leader] if leader is not None else []))
            return _entries(mapping.on_gateway(state, allocations, attachment, item), refs)
        case _ if source == "":
            keys = [state.keys[host].ref for host in (attachment.host, attachment.far_host) if host in state.keys]
            return _entries(gateway.base(state, allocations, attachment), _because(attachment), keys)
    return _NOTHING


def _because(attachment: Attachment, *more: Topology) -> tuple[str, ...]:
    """What every object of a part comes from; keys are named on what depends on them only."""
    ends = attachment.peering.ends
    refs = [attachment.peering.ref, *(f"Cluster/{end.cluster}/{end.cluster}" for end in ends)]
    refs += [f"Gateway/{end.cluster}/{end.gateway}" for end in ends]
    return (*refs, *(item.ref for item in more))


def _entries(objects: Iterable[PlanObject], because: Iterable[str], keys: Iterable[str] = ()) -> Part:
    refs = tuple(sorted(because))
    with_keys = tuple(sorted((*refs, *keys)))
    return SummedUnit.of(Entry(item, with_keys if isinstance(item, WireguardLink | WireguardPeer) else refs) for item in objects)
