"""Remaps from pools: which prefix an end sees the far cluster's as, where what it really is would overlap what is in use there. Pure.

What a prefix gets first is a hash of what it is for, so that the same topology leads to the same remaps in any order of arrival; when
that is taken, it is the next free one. What was chosen once stays, in use or kept: nothing but somebody else's need takes it away, and
only while its peering is gone or gives a remap of its own. So a choice can always be trusted: one in use was free when it was made and
has been defended by admission since, and one that is merely kept is forgotten as soon as anything in use overlaps it (``contradicted``),
or when its peering comes back and its far gateway has moved there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from schemas.allocation import Remap, Remaps
from schemas.topology import Cluster, Gateway, Node, Peering, Topology
from schemas.values import Address, Prefix
from services.planner import layout
from services.planner.state import Attachment, PeeringId, Seen, State, peering_key, seen_fields, seen_prefixes


class Exhausted(ValueError):
    """Nothing is free; the text names what is too small, `field` the field at fault, and `other` the object that could give more room."""

    def __init__(self, reason: str, field: str = "$.name", other: str = "") -> None:
        super().__init__(reason)
        self.field = field
        self.other = other


class Taken(NamedTuple):
    """A prefix that no remap may overlap, what it is there for (for a sentence), and its owner."""

    prefix: Prefix
    what: str
    owner: str


def taken(state: State, cluster: Cluster, but: str = "") -> Iterator[Taken]:
    """What is in use in a cluster: its own prefixes, what others hold at the site, what its peerings other than `but` see."""
    for prefix in own_prefixes(cluster):
        yield Taken(prefix, "", cluster.ref)
    for prefix in cluster.reserved:
        yield Taken(prefix, "the reserved ", cluster.ref)
    for neighbour in state.attachments[cluster.name].values():
        if neighbour.peering.ref != but:
            yield from (Taken(seen, "", neighbour.peering.ref) for seen, _ in seen_prefixes(state, neighbour))


def own_prefixes(cluster: Cluster) -> tuple[Prefix, ...]:
    return (*cluster.pod_prefixes, *cluster.external_prefixes, *cluster.internal_prefixes)


def far_addresses(state: State, attachment: Attachment) -> list[Address]:
    """Where an end's outer packets go, as far as it is known: not where a name leads."""
    far, given = state.gateways[attachment.far.cluster].get(attachment.far.gateway), attachment.far.endpoint
    return [*((given.address,) if given and given.address else ()), *(far.addresses if far else ())]


def choose(state: State, peering: Peering, *, is_established: bool = False) -> Remaps:
    """The peering's remaps, those that it has and those that it lacks yet. Both clusters must be known. Exhausted names the pools.

    An established peering keeps what it has, whatever it is asked to become; any other gives up what its outer packets would meet.
    """
    found = state.remaps.get(peering_key(peering), Remaps())
    for place in (0, 1):
        attachment = Attachment(peering, place)
        if not is_established:
            met = [address.host_prefix for address in far_addresses(state, attachment)]
            stays = [one for one in found.remaps if one.cluster != attachment.end.cluster or not _overlaps(one.seen, met)]
            if len(stays) < len(found.remaps):
                found = Remaps(tuple(stays))
                state = state.seeing({**state.remaps, peering_key(peering): found})
        for lack in _lacking(state, attachment):
            mapped = _free(state, attachment, lack, found)
            found = Remaps((*found.remaps, Remap(attachment.end.cluster, lack.real, mapped)))
    return found


def recovered(state: State, peering: Peering, held: Sequence[Mapping[Prefix, Prefix]]) -> Remaps:
    """The remaps that the ends' plans were made with, for when only the allocations were lost. `held` is by end: seen by real prefix."""
    return Remaps(
        tuple(
            Remap(peering.ends[place].cluster, one.real, held[place][one.real])
            for place in (0, 1)
            for one in seen_fields(state, Attachment(peering, place))
            if not one.is_given and held[place].get(one.real, one.real) != one.real
        )
    )


def with_choices(state: State, peerings: Iterable[Peering]) -> State:
    """The same topology, seen with what these peerings would get; not to be written to. Those that get nothing are left as they are."""
    view = state.seeing(dict(state.remaps))
    for peering in sorted(peerings, key=lambda peering: peering.ref):
        if all(end.cluster in state.clusters for end in peering.ends):
            try:
                view.remaps[peering_key(peering)] = choose(view, peering, is_established=peering.ref in state.peerings)
            except Exhausted:
                continue
    return view


def contradicted(state: State, items: Sequence[Topology]) -> list[tuple[PeeringId, Remap]]:
    """Remaps that are merely kept, and overlap what is in use now that `items` have joined the state, or are of no pool any more."""
    kept = [(key, remap) for key, remaps in state.remaps.items() for remap in remaps.remaps if items and not _in_use(state, key, remap)]
    news = {cluster: list(_news(state, cluster, items)) for cluster in {remap.cluster for _, remap in kept}}
    return [(key, remap) for key, remap in kept if _overlaps(remap.seen, news[remap.cluster]) or _left_over(state, remap)]


def _left_over(state: State, remap: Remap) -> bool:
    cluster = state.clusters.get(remap.cluster)
    return cluster is not None and not any(pool.contains(remap.seen) for pool in cluster.pools)


def _overlaps(prefix: Prefix, others: Iterable[Prefix]) -> bool:
    return any(prefix.overlaps(other) for other in others)


def _news(state: State, cluster: str, items: Sequence[Topology]) -> Iterator[Prefix]:
    """What `items` may have brought into use in a cluster. Nodes bring their addresses, of others it is not told apart what they bring."""
    if all(isinstance(item, Node) for item in items):
        for item in items:
            if isinstance(item, Node) and item.cluster == cluster:
                yield from (address.host_prefix for address in _places(item))
    elif cluster in state.clusters:
        yield from _blockers(state, state.clusters[cluster])
        for neighbour in state.attachments[cluster].values():
            yield from (address.host_prefix for address in far_addresses(state, neighbour))


def _lacking(state: State, attachment: Attachment) -> list[Seen]:
    """The far prefixes that cannot be used as they are, and have no remap, where the cluster has a pool of their family."""
    cluster = state.clusters[attachment.end.cluster]
    fields = list(seen_fields(state, attachment))
    families = {pool.family for pool in cluster.pools}
    plain = [one for one in fields if not one.is_given and one.seen == one.real and one.real.family in families]
    if not plain:
        return []
    used = [entry.prefix for entry in taken(state, cluster, attachment.peering.ref)]
    used += [one.seen for one in fields if one not in plain]
    return [one for one in plain if _overlaps(one.real, used)]


def _free(state: State, attachment: Attachment, lack: Seen, found: Remaps) -> Prefix:
    """The first prefix of the pools that is free for this, in the order that its hash gives; one that is kept only if no other is."""
    cluster, peering, real = state.clusters[attachment.end.cluster], attachment.peering, lack.real
    pools = sorted(pool for pool in cluster.pools if pool.family == real.family)
    blockers = list(_blockers(state, cluster, peering.ref))
    blockers += [address.host_prefix for address in far_addresses(state, attachment)]
    blockers += [one.seen for one in seen_fields(state, attachment) if one != lack]
    blockers += [remap.seen for remap in found.remaps if remap.cluster == cluster.name]
    kept = [
        remap.seen
        for place, remaps in state.remaps.items()
        for remap in remaps.remaps
        if remap.cluster == cluster.name and place != peering_key(peering) and not _in_use(state, place, remap)
    ]
    raw = hashlib.blake2b(f"{cluster.name}/{peering.cluster}/{peering.name}/{real}".encode(), digest_size=16).digest()
    start = int.from_bytes(raw, "big")
    mapped = first_free(pools, real.length, start, [*blockers, *kept]) or first_free(pools, real.length, start, blockers)
    if mapped is None:
        far = state.clusters[attachment.far.cluster]
        where = f"the pool{'s' if len(pools) > 1 else ''} {', '.join(pools)} of {cluster.ref}"
        msg = f"{real} of {far.ref} needs a remap, and no /{real.length} is free in {where}; give a remap or a larger pool"
        raise Exhausted(msg, f"$.ends[{attachment.place}].{lack.field}", cluster.ref)
    return mapped


def _blockers(state: State, cluster: Cluster, but: str = "") -> Iterator[Prefix]:
    """Where no remap of a cluster can be, whatever it is for."""
    yield from (entry.prefix for entry in taken(state, cluster, but))
    yield from map(Prefix, layout.RESERVED)
    yield from cluster.control
    for hosts in (state.nodes[cluster.name], state.gateways[cluster.name]):
        yield from (address.host_prefix for host in hosts.values() for address in _places(host))


def _places(host: Node | Gateway) -> tuple[Address, ...]:
    """Where a host is sent outer packets."""
    given = host.endpoint.address if isinstance(host, Node) and host.endpoint is not None else None
    return (*host.addresses, given) if given is not None else host.addresses


def _in_use(state: State, place: PeeringId, remap: Remap) -> bool:
    peering = state.peerings.get(f"Peering/{'/'.join(place)}")
    for index, end in enumerate(peering.ends if peering else ()):
        if peering and end.cluster == remap.cluster and all(one.cluster in state.clusters for one in peering.ends):
            return any(one.real == remap.real and not one.is_given for one in seen_fields(state, Attachment(peering, index)))
    return False


def first_free(pools: Sequence[Prefix], length: int, start: int, blockers: Iterable[Prefix]) -> Prefix | None:
    """The first prefix of this length in the pools that overlaps no blocker, counted from number `start` on and around; None without one.

    A blocker is stepped over in one, so that large ones cost no more than small ones.
    """
    rooms = [(pool, 1 << length - pool.length) for pool in pools if pool.length <= length]
    total = sum(count for _, count in rooms)
    blocked = list(blockers)
    tried = 0
    while tried < total:
        number = (start + tried) % total
        candidate, left = _numbered(rooms, number, length)
        blocker = next((prefix for prefix in blocked if prefix.overlaps(candidate)), None)
        if blocker is None:
            return candidate
        tried += min(left, _steps_over(blocker, candidate))
    return None


def _numbered(rooms: Iterable[tuple[Prefix, int]], number: int, length: int) -> tuple[Prefix, int]:
    """The prefix of this number, and how many there are from it to the end of its pool."""
    for pool, count in rooms:
        if number < count:
            first = int.from_bytes(pool.packed, "big") + number * (pool.size // count)
            return Prefix.of(first.to_bytes(len(pool.packed), "big"), length), count - number
        number -= count
    msg = "no such number"
    raise AssertionError(msg)


def _steps_over(blocker: Prefix, candidate: Prefix) -> int:
    """How many numbers further on the first prefix after the blocker is."""
    beyond = int.from_bytes(blocker.packed, "big") + blocker.size - int.from_bytes(candidate.packed, "big")
    return max(1, beyond // candidate.size)
