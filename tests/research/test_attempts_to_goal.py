"""Attempts until a goal: the first step whose mean with the step before reaches it, and medians with censored runs."""

from __future__ import annotations

import math

from research.paper.experiments import Curve, Median, median


def curve(*em: float) -> Curve:
    steps = range(1, len(em) + 1)
    return Curve(em, tuple(10 * step for step in steps), tuple(100 * step for step in steps))


def test_the_goal_is_reached_when_the_mean_of_two_steps_reaches_it() -> None:
    assert curve(0.9, 0.0, 0.4, 0.6, 1.0).reached() == 3  # a single step above one half is not enough
    assert curve(0.9, 0.2, 0.0).reached() == 1
    assert curve(0.4, 0.5, 0.4).reached() is None


def test_a_run_that_never_reaches_the_goal_counts_as_a_large_value() -> None:
    assert median([3.0, 1.0, math.inf]).value == 3.0
    assert median([3.0, math.inf, math.inf]).value == math.inf
    found = median([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.value, found.low, found.high) == (3.0, 1.0, 5.0)


def test_attempts_and_tokens_until_the_goal_are_infinite_if_it_is_never_reached() -> None:
    assert (curve(0.4, 0.6).attempts_to_goal(), curve(0.4, 0.6).tokens_to_goal()) == (20, 200)
    assert curve(0.4, 0.5).attempts_to_goal() == curve(0.4, 0.5).tokens_to_goal() == math.inf


def test_a_median_as_text() -> None:
    assert str(Median(2688.0, 2560.0, math.inf)) == "2,688 (2,560-never)"
    assert str(Median(math.inf, math.inf, math.inf)) == "never"
