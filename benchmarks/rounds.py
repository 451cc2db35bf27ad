"""Rounds of a measurement: all that is compared is measured in each, so that what the machine does otherwise falls on all alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Mapping

Round = Mapping[str, float]
"""What each took, by its name."""
_SEED = 1


def interleaved(names: Iterable[str], count: int, measure: Callable[[str], float]) -> list[Round]:
    """So many rounds, each in an order of its own, the same in each run; Python's garbage waits until they are over."""
    draw, order = random.Random(_SEED), list(names)
    rounds: list[Round] = []
    gc.disable()
    try:
        for _ in range(count):
            draw.shuffle(order)
            rounds.append({name: measure(name) for name in order})
    finally:
        gc.enable()
    return rounds
