"""How the shares of a traced flow's packets are summed up."""

from __future__ import annotations

import pytest

from benchmarks.figures.trace_seen import Kind, Seen, summed_up, wilson


def test_shares_are_of_what_arrived() -> None:
    """What was not sent through is no fault of the trace; what was lost is said."""
    rounds = [Seen(110, 100, 60, 40, 20, {"kernel": 1.0}, 40_000.0), Seen(100, 100, 40, 30, 30, {"kernel": 2.0, "queue": 0.0}, 50_000.0)]
    found = summed_up(Kind(100, beside=True), rounds)
    assert (found.name, found.median, found.unit) == ("trace-missed-100-beside-others", 75.0, "%")
    assert found.details["packets"] == {"sent": 210, "arrived": 200, "told of": 100}
    assert found.details["seen, %"] == {
        "at every point": 25.0,
        "at each of its own": 35.0,
        "at each of its own, of those that were told of": 70.0,
    }
    assert (found.details["said to be lost"], found.details["others a second"]) == ({"kernel": 3.0}, 45_000.0)
    assert summed_up(Kind(10), [Seen(1, 1, 1, 1, 1, {})]).details["said to be lost"] == "nothing"


@pytest.mark.parametrize("count,of,low,high", [(0, 250, 0.0, 0.0151), (250, 250, 0.9849, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)])
def test_the_interval_is_wilsons(count: int, of: int, low: float, high: float) -> None:
    """Also of nothing in some, of which the usual one would be empty."""
    assert wilson(count, of) == pytest.approx((low, high), abs=1e-4)
