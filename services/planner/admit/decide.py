"""The decision: what an object is asked, alone or together with others, and when one may go. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from schemas.firewall import FirewallConfiguration
from schemas.routing import RouteConfiguration
from schemas.topology import Cluster, EgressPolicy, Gateway, IpMapping, Node, Peering, Pod, PublicKey, Topology
from services.planner import layout
from services.planner.admit import cluster as clusters
from services.planner.admit import egress, firewall, hosts, mapping, mesh, routing
from services.planner.admit import peering as peerings
from services.planner.admit.in_use import taken_by_others
from services.planner.admit.problem import Problem, as_problems, missing_cluster
from services.planner.remaps import with_choices
from services.planner.state import HostId, State


def admit(item: Topology, state: State) -> Problem | None:
    """None when `item` may be put into `state`, else the first problem found."""
    return next(chain(_succession(item, state), _problems(item, state), taken_by_others(item, state.objects.get(item.ref), state)), None)


def admit_together(wishes: Mapping[str, Topology | None], state: State) -> Problem | None:
    """None when all these objects may be put into `state` (None: taken out) at once, though perhaps none of them alone.

    Else the first problem found.
    """
    trial = state.copy()
    items = [item for item in wishes.values() if item is not None]
    for ref, item in wishes.items():
        if item is None:
            trial.remove(ref)
    for item in items:
        trial.put(item)
    trial = with_choices(trial, _joined(trial, items))
    removals = (_removal(state.objects[ref], trial) for ref, item in wishes.items() if item is None and ref in state.objects)
    # One after the other: what comes later rests on what was asked before.
    asked = (chain(_succession(item, state), _problems(item, trial)) for item in items)
    others = (taken_by_others(item, state.objects.get(item.ref), trial) for item in items)
    return next(chain(*removals, *asked, *others), None)


def _joined(state: State, items: Iterable[Topology]) -> list[Peering]:
    """The peerings whose remaps may have to be chosen for these objects: those among them, and those of clusters among them."""
    found = {item.ref: item for item in items if isinstance(item, Peering)}
    for item in items:
        if isinstance(item, Cluster):
            found.update({attachment.peering.ref: attachment.peering for attachment in state.attachments[item.name].values()})
    return list(found.values())


def overtaken(item: Topology, before: Topology | None, stands: str) -> Problem | None:
    """Why `item` cannot take the place of `before`, which `stands` (as "is admitted"), by their revisions; None when nothing is wrong.

    Where both have one, it grows with each change: a lower one is an old copy, and an equal one of other content is nobody's successor.
    """
    if before is None or item.revision is None or before.revision is None or item.revision > before.revision or item == before:
        return None
    if item.revision < before.revision:
        reason = f"revision {item.revision} is older than revision {before.revision}, which {stands}"
    else:
        reason = f"revision {item.revision} {stands} with other content; a change needs a higher one"
    return Problem(reason, "$.revision", item.ref, retry=False)


def admit_removal(ref: str, state: State) -> Problem | None:
    """None when the object may go: nothing that is admitted needs it."""
    item = state.objects.get(ref)
    return next(_removal(item, state), None) if item is not None else None


def _removal(item: Topology, state: State) -> Iterator[Problem]:
    yield from (Problem(f"still used by {user}; it goes when that is gone", other=user) for user in _users(item, state))


def _users(item: Topology, state: State) -> Iterator[str]:
    match item:
        case Cluster():
            yield from (other.ref for other in state.objects.values() if not isinstance(other, Cluster) and item.name in _clusters(other))
        case Node():
            yield from (state.pods[item.cluster][name].ref for name in sorted(state.pods_by_node[HostId(item.cluster, item.name)]))
            yield from sorted(mapping.ref for mapping in state.mappings[item.cluster] if mapping.node == item.name)
            yield from sorted(policy.ref for policy in state.egress[item.cluster].values() if policy.node == item.name)
        case Gateway():
            if attachment := state.attachments[item.cluster].get(item.name):
                yield attachment.peering.ref


def _clusters(item: Topology) -> set[str]:
    return {end.cluster for end in item.ends} if isinstance(item, Peering) else {item.home}


def _succession(item: Topology, state: State) -> Iterator[Problem]:
    """What keeps `item` from following the admitted object of its name."""
    before = state.objects.get(item.ref)
    if (old := overtaken(item, before, "is admitted")) is not None:
        yield old
    if isinstance(item, Cluster) and isinstance(before, Cluster) and next(state.hosts_of(item.name), None) is not None:
        yield from _internal_in_use(item, before)
    if isinstance(item, Cluster) and isinstance(before, Cluster):
        yield from (Problem(*found) for found in mapping.still_needed(item, before, state))


def _problems(item: Topology, state: State) -> Iterator[Problem]:
    match item:
        case Cluster():
            yield from _cluster(item, state)
        case Node() | Gateway():
            yield from missing_cluster(item.cluster, "$.cluster", state) or hosts.host(item, state)
        case Pod():
            yield from missing_cluster(item.cluster, "$.cluster", state) or hosts.pod(item, state)
        case PublicKey():
            yield from hosts.public_key(item, state)
        case Peering():
            yield from peerings.peering(item, state)
        case IpMapping():
            yield from missing_cluster(item.cluster, "$.cluster", state) or _mapping(item, state)
        case EgressPolicy():
            yield from missing_cluster(item.cluster, "$.cluster", state) or as_problems(egress.problems(item, state))
        case FirewallConfiguration():
            yield from missing_cluster(item.cluster, "$.cluster", state) or _firewall(item, state)
        case RouteConfiguration():
            yield from missing_cluster(item.cluster, "$.cluster", state) or as_problems(routing.problems(item, state))


def _cluster(item: Cluster, state: State) -> Iterator[Problem]:
    yield from (Problem(*found, retry=False) for found in (*clusters.contradictions(item), *mesh.cluster(item)))
    yield from (Problem(*found) for found in mapping.sources(item))
    if item.name in state.clusters:
        yield from _dependents(item, state)


def _internal_in_use(item: Cluster, before: Cluster) -> Iterator[Problem]:
    """Hosts keep their overlay addresses, and their numbers must fit a prefix that is added."""
    for prefix in before.internal_prefixes:
        if prefix not in item.internal_prefixes:
            reason = f"{prefix} is in use: hosts have their overlay addresses from it; delete them first"
            yield Problem(reason, "$.internalPrefixes", item.ref)
    for index, prefix in enumerate(item.internal_prefixes):
        if prefix not in before.internal_prefixes and prefix.size <= layout.HOST_NUMBER_MAX + 1:
            reason = f"{prefix} is too small for the numbers that hosts have already; give a /20 or larger, or delete them first"
            yield Problem(reason, f"$.internalPrefixes[{index}]", item.ref)


def _dependents(item: Cluster, state: State) -> Iterator[Problem]:
    """A changed cluster must suit what is already admitted in it."""
    trial = state.copy()
    trial.put(item)
    trial = with_choices(trial, _joined(trial, [item]))
    # Peerings first: the questions about hosts rest on remaps that pair with the prefixes.
    for other in sorted(state.objects.values(), key=lambda other: not isinstance(other, Peering)):
        if other.ref != item.ref and item.name in _clusters(other):
            for problem in _problems(other, trial):
                yield Problem(f"{other.ref} would no longer be valid: {problem.reason}", other=other.ref)


def _mapping(item: IpMapping, state: State) -> Iterator[Problem]:
    yield from (Problem(*found) for found in mapping.problems(item, state))


def _firewall(item: FirewallConfiguration, state: State) -> Iterator[Problem]:
    yield from as_problems(firewall.taken_table(item, state))
    yield from as_problems(firewall.class_marks(item, state))
    yield from as_problems(mesh.marks(item, state))
