"""Intervals say how far a statistic of the rounds may be off, and no more."""

from __future__ import annotations

import random

import pytest

from benchmarks.interval import interval
from benchmarks.result import median


def test_rounds_that_agree_leave_no_doubt():
    found = interval([7.0] * 10, median)
    assert (found.value, found.low, found.high) == (7.0, 7.0, 7.0)


def test_the_statistic_lies_in_its_interval_which_narrows_with_more_rounds():
    draw = random.Random(5)
    few, many = ([draw.gauss(100, 10) for _ in range(count)] for count in (20, 500))
    found = [interval(rounds, median) for rounds in (few, many)]
    for item in found:
        assert item.low <= item.value <= item.high
    assert found[1].high - found[1].low < found[0].high - found[0].low


def test_an_interval_of_95_percent_misses_the_truth_about_once_in_twenty():
    """Asked of 60 sets of 40 rounds whose true median is known; the seed is fixed, so the number is, too."""
    draw = random.Random(11)
    found = [interval([draw.gauss(50, 5) for _ in range(40)], median) for _ in range(60)]
    missed = sum(not item.low <= 50 <= item.high for item in found)
    assert 1 <= missed <= 8


def test_what_was_measured_in_one_round_is_drawn_together():
    """A ratio between two numbers that wander together is certain, however much they wander."""
    rounds = [(float(number), 2.0 * number) for number in range(1, 30)]
    found = interval(rounds, lambda part: median(b / a for a, b in part))
    assert (found.low, found.high) == (2.0, 2.0)


def test_the_same_rounds_give_the_same_interval():
    rounds = [1.0, 4.0, 2.0, 8.0, 5.0]
    assert interval(rounds, median) == interval(rounds, median)


def test_no_rounds_is_no_interval():
    with pytest.raises(ValueError, match="no samples"):
        interval([], median)
