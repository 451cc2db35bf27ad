"""Epochs: which planner wrote a plan, and into which store.

The upper part of an epoch is the store's mark, the second in which its stream of snapshots was made; the lower part counts the planners
that wrote there. So an epoch says "later" within one store only. A store that was lost and made anew has another mark, and a host takes a
plan out of it only when that plan says that it takes over from the very epoch that the host holds.
"""

from __future__ import annotations

_PLANNER_BITS = 20
"""A million planners in one store; with the seconds above, an epoch stays below 2**53, which JSON carries exactly."""


def first_epoch(created_s: float) -> int:
    """The epoch of the first planner in a store whose snapshots' stream was made at `created_s`, Unix time."""
    return (int(created_s) << _PLANNER_BITS) + 1


def same_store(one: int, other: int) -> bool:
    """Whether two epochs are of one store."""
    return one >> _PLANNER_BITS == other >> _PLANNER_BITS


def may_follow(epoch: int, over: int, held: int) -> bool:
    """Whether a plan of `epoch` that takes over from `over` (0: from none) may replace one of epoch `held`."""
    return epoch >= held if same_store(epoch, held) else over == held
