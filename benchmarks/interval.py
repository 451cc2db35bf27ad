"""How sure a statistic over rounds is: percentile bootstrap. Deterministic: the same rounds give the same interval."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from benchmarks.result import quantile, rounded

T = TypeVar("T")

_RESAMPLES = 1000
_SEED = 1


class Interval(Struct, frozen=True):
    """A statistic of the rounds as they were, and where 95 % of it lies when rounds are drawn again with replacement."""

    value: float
    low: float
    high: float


def interval(rounds: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Interval:
    """The statistic with its 95 % interval. Whole rounds are drawn, so that what was measured side by side stays together.

    ValueError for no rounds, from `statistic`.
    """
    value = statistic(rounds)
    draw = random.Random(_SEED)
    again = [statistic(draw.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES)]
    return Interval(rounded(value), rounded(quantile(again, 0.025)), rounded(quantile(again, 0.975)))
