"""What a figure comes to: one measured median, beside the floor and the peer that were measured in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct

Unit = Literal["ns", "ms", "s", "MiB", "rules", "%"]
Details = dict[str, object]


class Spread(Struct, frozen=True):
    """How the samples behind a median lie. `low` and `high` are the quartiles, in the figure's unit."""

    count: int
    minimum: float
    low: float
    high: float
    p99: float
    maximum: float


class Result(Struct, frozen=True):
    """One figure. Less is better in every unit. `ratio_…` is median over peer or floor; None where there is no such thing."""

    name: str
    median: float
    unit: Unit
    peer: float | None
    floor: float | None
    ratio_peer: float | None
    ratio_floor: float | None
    goal: float | None
    met: bool | None
    spread: Spread
    details: Details


class Figure(Struct, frozen=True):
    """A benchmark. `run` is told how to say what it is doing; it raises MeshmarkError or OSError when it cannot be run here."""

    name: str
    about: str
    run: Callable[[Callable[[str], None]], Sequence[Result]]
    needs_root: bool = False


def result(
    name: str,
    samples: Sequence[float],
    unit: Unit,
    *,
    peer: float | None = None,
    floor: float | None = None,
    goal: float | None = None,
    details: Details | None = None,
) -> Result:
    """Sum samples up. ValueError when there are none: a figure without a measurement is no figure."""
    middle = quantile(samples, 0.5)
    return Result(
        name,
        rounded(middle),
        unit,
        None if peer is None else rounded(peer),
        None if floor is None else rounded(floor),
        ratio(middle, peer),
        ratio(middle, floor),
        goal,
        None if goal is None else middle <= goal,
        spread(samples),
        details or {},
    )


def spread(samples: Sequence[float]) -> Spread:
    return Spread(len(samples), *(rounded(quantile(samples, share)) for share in (0.0, 0.25, 0.75, 0.99, 1.0)))


def quantile(samples: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, between neighbours by linear interpolation; ValueError for none."""
    ordered = sorted(samples)
    if not ordered:
        msg = "no samples"
        raise ValueError(msg)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(samples: Iterable[float]) -> float:
    return quantile(samples, 0.5)


def ratio(value: float, base: float | None) -> float | None:
    """`value` over `base`; None when there is nothing to compare with."""
    return rounded(value / base) if base else None


def rounded(value: float, digits: int = 4) -> float:
    """`value` with as many significant digits as a measurement can have."""
    return float(f"{value:.{digits}g}")
