"""What a packet pays for a trace of others is told with its interval."""

from __future__ import annotations

from benchmarks.figures.trace_cost import CLOSED, OPEN, summed_up


def test_the_figure_is_the_difference_within_a_round() -> None:
    """A round that was slow as a whole does not count as cost."""
    found = summed_up("outside", [{CLOSED: 1000.0, OPEN: 1400.0}, {CLOSED: 9000.0, OPEN: 9400.0}, {CLOSED: 1000.0, OPEN: 1410.0}])
    assert (found.name, found.median, found.unit) == ("trace-cost-outside", 400.0, "ns")
    assert found.details["a trace of others adds ns"] == {"median": 400.0, "from": 400.0, "to": 410.0}
