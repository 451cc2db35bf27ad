"""Snapshots: one change rewrites one chunk, and a torn one is noticed."""

from __future__ import annotations

import pytest

from schemas.plan import HostPlan, diff_units
from schemas.snapshot import Chunks, TornError, join
from tests.topologies import ROME_GATEWAY, keys, pod, settled_plans, two_clusters

ITEMS = [*two_clusters(200), *keys()]
BEFORE = settled_plans(ITEMS)[ROME_GATEWAY]
AFTER = settled_plans([*ITEMS, pod("roam", "worker-2", "10.200.250.7")])[ROME_GATEWAY]


def written(chunks: Chunks, plan: HostPlan) -> HostPlan:
    return join(chunks.head(plan, 1, 1), [chunks.encoded(number) for number in range(len(chunks))])


def test_a_change_rewrites_the_chunk_that_it_touches() -> None:
    """A pod among 200 nodes changes one of several chunks; the rest keep their bytes, and all together are the new plan."""
    chunks = Chunks(BEFORE)
    assert len(chunks) >= 4
    before = [chunks.encoded(number) for number in range(len(chunks))]
    changed = chunks.change(diff_units(BEFORE.units, AFTER.units))
    assert len(changed) == 1
    assert [number for number, data in enumerate(before) if chunks.encoded(number) != data] == changed
    assert written(chunks, AFTER) == AFTER
    assert chunks.digests == Chunks(AFTER).digests


def test_a_torn_snapshot_is_noticed() -> None:
    """Chunks of two generations do not make a plan, and a missing chunk is no chunk."""
    chunks = Chunks(BEFORE)
    head = chunks.head(BEFORE, 1, 1)
    data = [chunks.encoded(number) for number in range(len(chunks))]
    (number,) = chunks.change(diff_units(BEFORE.units, AFTER.units))
    for wrong in (chunks.encoded(number), b""):
        with pytest.raises(TornError):
            join(head, [*data[:number], wrong, *data[number + 1 :]])


def test_a_plan_that_outgrows_its_chunks_says_so() -> None:
    """When chunks have become twice too large, the plan is dealt anew."""
    small = settled_plans([*two_clusters(), *keys()])[ROME_GATEWAY]
    chunks = Chunks(small)
    assert not chunks.is_crowded
    chunks.change(diff_units(small.units, BEFORE.units))
    assert chunks.is_crowded
