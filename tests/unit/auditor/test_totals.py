"""Counts of rules as totals that never go back, whatever happens to the rules."""

from __future__ import annotations

from schemas.encryption import POINTS, Point, log_prefix, logged, point_of
from services.auditor.totals import NOTHING, Count, Totals
from services.kernel.port import RuleCount

OUT = Point("to-network", "plaintext", "pods")


def count(handle: int, packets: int, point: Point = OUT) -> RuleCount:
    return RuleCount("clear_out_pods", handle, point.comment("left in clear"), packets, 100 * packets)


def test_what_came_since_the_last_look() -> None:
    """Of each point; rules that count nothing of it are left out."""
    totals = Totals()
    other = RuleCount("leave", 9, "somebody's comment", 5, 5)
    assert totals.take([count(1, 3), other]) == {OUT: Count(3, 300)}
    assert totals.take([count(1, 3), other]) == {OUT: NOTHING}
    assert totals.take([count(1, 5), count(2, 1)]) == {OUT: Count(3, 300)}


def test_rules_that_are_written_anew_count_from_nothing() -> None:
    """With another handle, or with the same where the whole table was; and what is gone takes nothing back."""
    totals = Totals()
    totals.take([count(1, 30)])
    assert totals.take([count(4, 7)]) == {OUT: Count(7, 700)}
    assert totals.take([]) == {}
    assert totals.take([count(4, 2)]) == {OUT: Count(2, 200)}
    assert totals.take([count(4, 1)]) == {OUT: Count(1, 100)}


def test_comments_and_prefixes_name_points() -> None:
    """Each one its own, whatever is said behind it; a comment fits into a rule."""
    for point in POINTS:
        comment = point.comment("WireGuard's own packets arrived")
        assert point_of(comment) == point
        assert len(comment) <= 128
    assert logged(log_prefix("in", "overlay")) == Point("from-network", "plaintext", "overlay")
    assert {point.direction for point in POINTS} == {"in", "out"}
    assert point_of("count of sheep: 7") is None
    assert logged("") is None
