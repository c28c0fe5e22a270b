"""Attempts until a goal: the first step whose mean with the step before reaches it, and medians with censored runs."""

from __future__ import annotations

import math

from research.paper.experiments import Curve, median_text


def curve(*em: float) -> Curve:
    steps = range(1, len(em) + 1)
    return Curve(em, tuple(10 * step for step in steps), tuple(100 * step for step in steps))


def test_the_goal_is_reached_when_the_mean_of_two_steps_reaches_it() -> None:
    assert curve(0.9, 0.0, 0.4, 0.6, 1.0).reached() == 3  # a single step above one half is not enough
    assert curve(0.9, 0.2, 0.0).reached() == 1
    assert curve(0.4, 0.6).until_goal(curve(0.4, 0.6).tokens) == 200
    assert curve(0.4, 0.4).until_goal((10, 20)) == math.inf


def test_a_run_that_never_reaches_the_goal_counts_as_a_large_value() -> None:
    assert median_text([1.0, 2.0, 3.0, 4.0, 5.0]) == "3 (1-5)"
    assert median_text([3000.0, 1000.0, math.inf]) == "3,000 (1,000-never)"
    assert median_text([3.0, math.inf, math.inf]).startswith("never (3-")
    assert median_text([math.inf] * 3) == "never"
