"""What closing lines of suites count, by the properties that tests recorded."""

from __future__ import annotations

from tests.closing import counted

POINTS = [("point", "native forward here TO_CRYPTO"), ("point", "native forward here TO_CRYPTO"), ("point", "native reply here TO_CRYPTO")]
STEER = [("broken_way", "mark rule removed"), ("detected", ("mark rule removed", "trace")), ("detected", ("mark rule removed", "alert"))]
PEER = [("broken_way", "peer removed"), ("detected", ["peer removed", "trace"])]


def test_a_suite_without_counts_says_nothing() -> None:
    assert counted("unit", POINTS, POINTS) == ""


def test_encryption_counts_modes_and_paths_of_what_passed() -> None:
    """Different ones."""
    passed = [("mode", "native"), ("mode", "native"), ("path", "a"), ("path", "b")]
    assert counted("encryption", passed, [*passed, ("path", "c")]) == "modes=1 paths=2"


def test_trace_counts_points_that_were_seen_and_ways_that_were_told() -> None:
    """All is well: each way was told by both."""
    passed = POINTS + STEER
    assert counted("trace", passed, passed) == "points=2 broken_ways=1 undetected=0 false_alarms=0"


def test_a_way_that_one_of_them_missed_is_undetected() -> None:
    """Though its test failed, and is not among those that passed."""
    assert counted("trace", STEER, STEER + PEER) == "points=0 broken_ways=2 undetected=1 false_alarms=0"


def test_each_alert_of_a_sound_mesh_is_a_false_alarm() -> None:
    """Of tests that failed for it."""
    assert counted("trace", [], [("false_alarm", "out pods a b")] * 2) == "points=0 broken_ways=0 undetected=0 false_alarms=2"
