"""How samples of transactions are taken in turns, and what one element may take."""

from __future__ import annotations

import pytest

from benchmarks.figures.nft_engine import Took, hash_goal_ms, in_turns


def test_ways_take_turns_and_slow_ones_seldom() -> None:
    """Each sample is taken back before the next one."""
    done: list[str] = []

    def way(name: str):
        def work() -> Took:
            done.append(name)
            return Took(len(done), 0.0)

        return work

    samples = in_turns({"quick": way("quick"), "slow": way("slow")}, 5, lambda name: done.append(f"{name} back"), {"slow": 3})
    both, one = ["quick", "quick back", "slow", "slow back"], ["quick", "quick back"]
    assert done == [*both, *one, *one, *both, *one]
    assert {name: len(found) for name, found in samples.items()} == {"quick": 5, "slow": 2}


@pytest.mark.parametrize("size,nft_ms,library_ms,goal_ms", [(100, 30, 50, 0.4), (50_000, 900, 800, 0.4), (50_000, 900, 200, 0.2)])
def test_beside_many_an_element_is_to_be_a_thousand_times_as_fast(size: int, nft_ms: float, library_ms: float, goal_ms: float) -> None:
    """As either of the ways that read all that is there first; never slower than the fixed goal."""
    samples = {"nft -f": [Took(nft_ms, 0.0)], "libnftables": [Took(library_ms, 0.0)]}
    assert hash_goal_ms(samples, size) == pytest.approx(goal_ms)
