"""Epochs: later within a store, nothing across stores but by name."""

from __future__ import annotations

from schemas.epochs import first_epoch, may_follow, same_store

OLD, NEW = first_epoch(1_700_000_000.9), first_epoch(1_800_000_000.0)


def test_planners_of_one_store_follow_each_other() -> None:
    """The next planner's plans replace the last one's, and not the other way round."""
    assert same_store(OLD, OLD + 1000)
    assert may_follow(OLD + 1, 0, OLD)
    assert may_follow(OLD, 0, OLD)
    assert not may_follow(OLD, 0, OLD + 1)


def test_another_store_follows_only_what_it_names() -> None:
    """A plan out of a store that was made anew, however late, replaces just the one that it takes over from."""
    assert not same_store(OLD, NEW)
    assert not may_follow(NEW, 0, OLD)
    assert not may_follow(OLD, 0, NEW)
    assert may_follow(NEW, OLD, OLD)
    assert not may_follow(NEW, OLD, OLD + 1)


def test_an_epoch_is_a_number_that_json_carries() -> None:
    """Programs in other languages read numbers as doubles."""
    assert first_epoch(4_000_000_000.0) + 1_000_000 < 2**53
