"""A plan without the hops that lead through dead tunnels: what a host must hold while its own probes say that they carry nothing. Pure.

Applier and auditor both need it, and the plan's digests know nothing of it: which tunnels work is the host's own knowledge.

A dead hop's place among the hops of its route is not closed but given to the hops that live. The kernel picks a hop by where a flow's hash
falls among the hops' shares, in their order; so flows of living hops stay where they are, in any kernel and without a resilient
next-hop group, and only the dead hop's flows move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from schemas.host_objects import NextHop, PlanObject, Route
from schemas.values import IPV4

_WEIGHT_MAX = 256
"""The kernel keeps a hop's weight, less one, in a byte."""
_HOPS_MAX = 256
"""More hops than this in a route only cost; no kernel limit."""


def without(objects: Mapping[str, PlanObject], dead: Collection[str]) -> Mapping[str, PlanObject]:
    """`objects` of a plan, without the hops through these links. A route that would lose all its hops keeps them all."""
    if not dead:
        return objects
    return {key: _without(item, dead) if isinstance(item, Route) else item for key, item in objects.items()}


def _without(item: Route, dead: Collection[str]) -> Route:
    # IPv6 refuses a route that names a hop twice.
    hops = living_hops(item.hops, dead, repeated=item.prefix.family == IPV4)
    return item if hops is item.hops else replace(item, hops=hops)


def living_hops(hops: tuple[NextHop, ...], dead: Collection[str], *, repeated: bool) -> tuple[NextHop, ...]:
    """Hops that send the flows of dead links to living ones, and every other flow where it goes already.

    Where a hop may stand there `repeated`, all living hops share the dead ones' flows by weight; else each dead hop's neighbours do.
    """
    living = [hop for hop in hops if hop.link not in dead]
    if not living or len(living) == len(hops):
        return hops
    if len(living) == 1:
        return (replace(living[0], weight=1),)
    shared = _shared(hops, living) if repeated else ()
    fits = 0 < len(shared) <= _HOPS_MAX and all(hop.weight <= _WEIGHT_MAX for hop in shared)
    return shared if fits else _absorbed(hops, living)


def _shared(hops: Sequence[NextHop], living: Sequence[NextHop]) -> tuple[NextHop, ...]:
    """Each dead hop's place divided among all that live."""
    total = sum(hop.weight for hop in living)
    found: list[NextHop] = []
    place = 0
    for hop in hops:
        if hop in living:
            found.append(replace(hop, weight=hop.weight * total))
            place += 1
        else:
            # From the one before it, backwards and around, to the one after it: next to their own places, which they only widen.
            heirs = (*reversed(living[:place]), *reversed(living[place:]))
            found.extend(replace(heir, weight=hop.weight * heir.weight) for heir in heirs)
    return _reduced(_joined(found))


def _joined(hops: Iterable[NextHop]) -> Iterator[NextHop]:
    """Neighbours through the same link made one."""
    for _, group in itertools.groupby(hops, key=lambda hop: (hop.link, hop.via)):
        first, *more = group
        yield replace(first, weight=first.weight + sum(hop.weight for hop in more))


def _absorbed(hops: Sequence[NextHop], living: Sequence[NextHop]) -> tuple[NextHop, ...]:
    """Each dead hop's place divided between the living ones before and after it; at an end, all of it for the only one there is."""
    weights = [2 * hop.weight for hop in living]
    place = 0
    for hop in hops:
        if hop in living:
            place += 1
        else:
            weights[max(place - 1, 0)] += hop.weight
            weights[min(place, len(living) - 1)] += hop.weight
    reduced = _reduced(replace(hop, weight=weight) for hop, weight in zip(living, weights, strict=True))
    largest = max(hop.weight for hop in reduced)
    if largest <= _WEIGHT_MAX:
        return reduced
    return tuple(replace(hop, weight=max(1, hop.weight * _WEIGHT_MAX // largest)) for hop in reduced)


def _reduced(hops: Iterable[NextHop]) -> tuple[NextHop, ...]:
    found = tuple(hops)
    unit = math.gcd(*(hop.weight for hop in found))
    return tuple(replace(hop, weight=hop.weight // unit) for hop in found)
