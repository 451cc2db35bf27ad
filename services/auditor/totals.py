"""What rules count, over changes of plans, as totals that never go back. Pure.

A rule that is written anew has a new handle, and counts from 0. What it counted between the last look and its end is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas.encryption import Point, point_of
from services.kernel.port import RuleCount


class Count(NamedTuple):
    """Packets and bytes."""

    packets: int
    bytes: int

    def plus(self, other: Count) -> Count:
        return Count(self.packets + other.packets, self.bytes + other.bytes)

    def beyond(self, before: Count) -> Count:
        """What came since `before`; all of it where a rule began anew."""
        begun = self.packets < before.packets or self.bytes < before.bytes
        return self if begun else Count(self.packets - before.packets, self.bytes - before.bytes)


NOTHING = Count(0, 0)


class Totals:
    """Remembers what each rule of a table had counted at the last look."""

    def __init__(self) -> None:
        self._last: dict[int, Count] = {}

    def take(self, counts: Iterable[RuleCount]) -> dict[Point, Count]:
        """What was counted at each point since the last look; at the first, since the rules were written."""
        found: dict[Point, Count] = {}
        last: dict[int, Count] = {}
        for item in counts:
            point = point_of(item.comment)
            if point is not None:
                now = last[item.handle] = Count(item.packets, item.bytes)
                found[point] = found.get(point, NOTHING).plus(now.beyond(self._last.get(item.handle, NOTHING)))
        self._last = last
        return found
