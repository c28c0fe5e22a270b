"""Means over seeds and their intervals: hand-computed values and the rate at which intervals cover the mean."""

import math

import numpy as np
import pytest

from research.paper.report import Estimate, estimate, student_975

QUANTILES = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 10: 2.22814, 30: 2.04227, 1000: 1.96234}


@pytest.mark.parametrize("freedom", QUANTILES)
def test_quantiles_match_printed_tables(freedom):
    assert student_975(freedom) == pytest.approx(QUANTILES[freedom], rel=3e-6)


def test_an_interval_by_hand():
    # mean 0.5, s = 0.1, half = 4.30265 * 0.1 / sqrt(3)
    found = estimate([0.4, 0.5, 0.6])
    assert (found.mean, found.count) == (pytest.approx(0.5), 3)
    assert found.half == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)


def test_one_seed_has_no_interval():
    assert estimate([0.7]) == Estimate(0.7, None, 1)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.1, 0.0, -0.2], "not resolved"),
        ([-0.10, -0.11, -0.12], "lower"),
        ([0.10, 0.11, 0.12], "higher"),
        ([0.0, 0.0, 0.0], "equal"),
        ([-0.1], "one run is not enough"),
    ],
)
def test_a_difference_whose_interval_includes_zero_is_no_difference(differences, verdict):
    assert estimate(differences).verdict == verdict


def coverage(draws, half):
    return np.mean(np.abs(draws.mean(axis=1)) <= half(draws))


def test_ninety_five_percent_of_intervals_include_the_mean():
    draws = np.random.default_rng(0).normal(size=(4000, 3))
    ours = coverage(draws, lambda rows: np.array([estimate(row.tolist()).half for row in rows[:]]))
    assert ours == pytest.approx(0.95, abs=0.01)
    # Control: the quantile of the normal distribution is too small for three seeds.
    assert coverage(draws, lambda rows: 1.96 * rows.std(axis=1, ddof=1) / math.sqrt(3)) < 0.85
