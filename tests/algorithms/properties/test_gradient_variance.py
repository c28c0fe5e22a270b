"""P12: if only the first of two turns matters, turn-level advantages have less variance than trajectory-level ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from benchmark_scripts import load_benchmark
from hypothesis import strategies as st
from searching import holds, rejected

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS

NoiseFn = Callable[[float, float], Any]
"""Probabilities of arm 1 in the two turns -> the benchmark's ``GradientNoise``."""

PROBABILITIES = st.sampled_from([0.2, 0.35, 0.5, 0.65, 0.8])
TURN_LEVEL = ["gigpo", "gtpo", "reinforce", "ppo-turn"]


BENCHMARK = load_benchmark("credit")


def noise_of(algorithm: Algorithm, *, late: bool = False) -> NoiseFn:
    """Return the exact gradient noise of an algorithm; if ``late``, the first turn's reward is given at the end."""
    return lru_cache(lambda first, last: BENCHMARK.gradient_noise(algorithm, first, last, late=late))


TRAJECTORY_LEVEL = [noise_of(ALGORITHMS[name]) for name in BENCHMARK.TRAJECTORY_LEVEL]


def has_less_noise_than_trajectory_level(noise: NoiseFn, first: float, last: float) -> None:
    found = noise(first, last)
    assert all(found.over_signal < other(first, last).over_signal for other in TRAJECTORY_LEVEL)


def has_the_right_mean_direction(noise: NoiseFn, first: float, last: float) -> None:
    """On average towards the better arm in the first turn, and 0 in the last."""
    mean = noise(first, last).mean
    assert mean[0] > 0 and abs(mean[1]) < 1e-12


@pytest.mark.parametrize("name", TURN_LEVEL)
def test_turn_level_advantages_have_less_noise(name: str) -> None:
    holds(has_less_noise_than_trajectory_level, noise_of(ALGORITHMS[name]), PROBABILITIES, PROBABILITIES, count=6)


@pytest.mark.parametrize("name", TURN_LEVEL)
def test_a_turn_reward_given_at_the_end_is_detected(name: str) -> None:
    late = noise_of(ALGORITHMS[name], late=True)
    rejected(has_less_noise_than_trajectory_level, late, PROBABILITIES, PROBABILITIES, count=6)


@pytest.mark.parametrize("name", [*BENCHMARK.TRAJECTORY_LEVEL, *BENCHMARK.TURN_LEVEL])
def test_every_gradient_has_the_right_mean_direction(name: str) -> None:
    holds(has_the_right_mean_direction, noise_of(ALGORITHMS[name]), PROBABILITIES, PROBABILITIES, count=2)


def test_a_return_without_later_rewards_is_detected() -> None:
    advantage = ALGORITHMS["reinforce"].advantage.model_copy(update={"gamma": 0.0})
    shortsighted = ALGORITHMS["reinforce"].model_copy(update={"advantage": advantage})
    noise = noise_of(shortsighted, late=True)
    rejected(has_the_right_mean_direction, noise, PROBABILITIES, PROBABILITIES, count=2)


def test_comparing_turns_of_equal_number_gives_the_last_turn_no_gradient_at_all() -> None:
    found = BENCHMARK.gradient_noise(ALGORITHMS["gtpo"], 0.35, 0.65)
    assert found.variance[1] == 0.0 < found.variance[0]
    grpo = BENCHMARK.gradient_noise(ALGORITHMS["grpo"], 0.35, 0.65)
    assert grpo.variance[1] > 0.001  # control: trajectory-level advantages do
