"""How a chain gets from the rules that it holds to those that it is to hold, rule by rule. Pure.

What does not change keeps its handle, and with it what its counters have counted. A rule that moves past others is deleted and comes anew:
the kernel knows no moving.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, count
from typing import NamedTuple

Handles = array  # of rules, 8 bytes each
_TYPE = "Q"


def handles_of(items: Iterable[int]) -> Handles[int]:
    return array(_TYPE, items)


class Edit(NamedTuple):
    """What becomes of a chain's rules.

    `gone` are the handles of rules that go. `coming` are new ones: their place in the new chain, and the handle of the kept rule that they
    come before (0: at the end). `handles` are those of the new chain, 0 for what comes.
    """

    gone: tuple[int, ...]
    coming: tuple[tuple[int, int], ...]
    handles: Handles[int]


def edit(held: Sequence[Hashable], handles: Handles[int], wanted: Sequence[Hashable]) -> Edit:
    """`handles` are those of the rules that are `held`. Equal values are equal rules; any order and any doubles are right."""
    begin = _alike(held, wanted)
    most = min(len(held), len(wanted)) - begin
    end = min(_alike(held[::-1], wanted[::-1]), most)
    middle, behind = handles[begin : len(handles) - end], handles[len(handles) - end :]
    kept = _kept(held[begin : len(held) - end], wanted[begin : len(wanted) - end])
    within = [0] * (len(wanted) - begin - end)
    for place, old in kept:
        within[place] = middle[old]
    staying = {old for _, old in kept}
    coming, before = [], behind[0] if behind else 0
    for place in reversed(range(len(within))):
        if within[place]:
            before = within[place]
        else:
            coming.append((begin + place, before))
    gone = tuple(handle for place, handle in enumerate(middle) if place not in staying)
    return Edit(gone, tuple(reversed(coming)), handles[:begin] + array(_TYPE, within) + behind)


def _alike(ones: Sequence[Hashable], others: Sequence[Hashable]) -> int:
    """How many at the beginning are equal. Most are the very same objects, and identity is the cheaper question."""
    for place in compress(count(), map(operator.is_not, ones, others)):
        if ones[place] != others[place]:
            return place
    return min(len(ones), len(others))


def _kept(held: Sequence[Hashable], wanted: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places in `wanted` and in `held` of what stays: as much as can stay in its order, of doubles the first for the first."""
    places: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for place, item in enumerate(held):
        places[item].append(place)
    pairs = [(place, places[item].popleft()) for place, item in enumerate(wanted) if places.get(item)]
    return _rising(pairs)


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of pairs in which the second numbers rise."""
    ends: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for number, (_, old) in enumerate(pairs):
        length = bisect_left(ends, old)
        before.append(at[length - 1] if length else -1)
        ends[length : length + 1] = [old]
        at[length : length + 1] = [number]
    found = []
    number = at[-1] if at else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]
