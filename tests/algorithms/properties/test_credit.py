"""P12: where only the first of two turns matters, credit of turns is less noisy than credit of trajectories.

Not here: decoding guided by a value.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from searching import holds, rejected

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS

Measured = Callable[[float, float], Any]
"""Probabilities of arm 1 in the two turns -> the benchmark's ``Noise``."""

CHANCES = st.sampled_from([0.2, 0.35, 0.5, 0.65, 0.8])


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("credit", Path(__file__).parents[3] / "benchmarks" / "credit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["credit"] = module
    spec.loader.exec_module(module)
    return module


BANDIT = _benchmark()


def of(row: Algorithm, *, late: bool = False) -> Measured:
    """The noise of a row's gradient, exactly; ``late``: what the first turn earned is paid at the end."""
    return lru_cache(lambda first, last: BANDIT.noise(row, first, last, late=late))


OF_TRAJECTORIES = [of(ALGORITHMS[name]) for name in BANDIT.OF_TRAJECTORIES]


def it_is_less_noisy_than_credit_of_trajectories(measured: Measured, first: float, last: float) -> None:
    found = measured(first, last).over_signal
    assert all(found < other(first, last).over_signal for other in OF_TRAJECTORIES)


def it_points_to_the_answer(measured: Measured, first: float, last: float) -> None:
    """On average to the better arm of the first turn, and nowhere in the last."""
    mean = measured(first, last).mean
    assert mean[0] > 0 and abs(mean[1]) < 1e-12


@pytest.mark.parametrize("name", ["gigpo", "gtpo", "reinforce", "ppo-turn"])
def test_credit_of_turns_is_less_noisy(name: str) -> None:
    holds(it_is_less_noisy_than_credit_of_trajectories, of(ALGORITHMS[name]), CHANCES, CHANCES, count=6)


@pytest.mark.parametrize("name", ["gigpo", "gtpo", "reinforce", "ppo-turn"])
def test_a_turns_reward_paid_at_the_end_is_seen(name: str) -> None:
    rejected(it_is_less_noisy_than_credit_of_trajectories, of(ALGORITHMS[name], late=True), CHANCES, CHANCES, count=6)


@pytest.mark.parametrize("name", [*BANDIT.OF_TRAJECTORIES, *BANDIT.OF_TURNS])
def test_every_gradient_points_to_the_answer(name: str) -> None:
    holds(it_points_to_the_answer, of(ALGORITHMS[name]), CHANCES, CHANCES, count=2)


def test_a_return_that_forgets_what_is_to_come_is_seen() -> None:
    advantage = ALGORITHMS["reinforce"].advantage.model_copy(update={"gamma": 0.0})
    shortsighted = ALGORITHMS["reinforce"].model_copy(update={"advantage": advantage})
    rejected(it_points_to_the_answer, of(shortsighted, late=True), CHANCES, CHANCES, count=2)


def test_turns_of_equal_number_teach_the_last_turn_nothing_at_all() -> None:
    found = BANDIT.noise(ALGORITHMS["gtpo"], 0.35, 0.65)
    assert found.variance[1] == 0.0 < found.variance[0]
    assert BANDIT.noise(ALGORITHMS["grpo"], 0.35, 0.65).variance[1] > 0.001  # control: credit of trajectories does


def test_the_figure_is_printed() -> None:
    lines = list(BANDIT.lines(0.5, 0.5))
    print("\nalgorithm, credit of, variance / squared mean: first turn, last turn, both, to grpo, paid at the end")
    print("\n".join(", ".join(line) for line in lines))
    assert [line[0] for line in lines] == [*BANDIT.OF_TRAJECTORIES, *BANDIT.OF_TURNS]
