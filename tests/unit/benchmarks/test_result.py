"""Figures are summed up honestly: medians, ratios, goals, and nothing out of nothing."""

from __future__ import annotations

import pytest

from benchmarks.result import median, quantile, ratio, result, rounded, spread


@pytest.mark.parametrize(
    "samples, share, wanted",
    [([3.0], 0.99, 3.0), ([1.0, 2.0], 0.5, 1.5), ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0), ([1.0, 2.0, 3.0, 4.0, 5.0], 0.75, 4.0)],
)
def test_a_quantile_lies_between_its_neighbours(samples, share, wanted):
    assert quantile(samples, share) == wanted


def test_p99_of_200_samples_is_no_outlier_but_near_the_last():
    samples = [float(number) for number in range(1, 201)]
    assert quantile(samples, 0.99) == pytest.approx(198.01)
    assert spread(samples).p99 == pytest.approx(198)


def test_no_samples_is_no_figure():
    with pytest.raises(ValueError, match="no samples"):
        result("nothing", [], "ms")


def test_a_median_is_untouched_by_one_wild_sample():
    assert median([1.0, 1.0, 1.0, 1.0, 900.0]) == 1.0


def test_ratios_are_the_median_over_peer_and_floor():
    found = result("some", [10.0, 20.0, 30.0], "ms", peer=40.0, floor=5.0)
    assert (found.ratio_peer, found.ratio_floor) == (0.5, 4.0)


def test_without_peer_floor_and_goal_there_is_nothing_to_say_about_them():
    found = result("some", [1.0], "s")
    assert (found.peer, found.floor, found.ratio_peer, found.ratio_floor, found.goal, found.met) == (None,) * 6


@pytest.mark.parametrize("goal, met", [(2.0, True), (2.5, True), (1.9, False)])
def test_a_goal_is_met_by_the_median_up_to_the_goal_itself(goal, met):
    assert result("some", [1.0, 2.0, 3.0], "ms", goal=goal).met is met


def test_a_ratio_to_nothing_is_none_not_infinite():
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_four_digits_are_what_a_measurement_has():
    assert rounded(12.345678) == 12.35
    assert rounded(0.000123456) == 0.0001235
