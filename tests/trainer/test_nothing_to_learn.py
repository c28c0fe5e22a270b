"""Where a batch teaches nothing, or a part of it may not, weights stay and every attempt is told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from learning import sampled

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import Estimate
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Status
from agent_r1.model.checksum import weights_checksum
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import NO_ADVANTAGE, REJECTED, Learner, Update


def learner_of(model: Any, row: Algorithm | str) -> Learner:
    algorithm = build_algorithm(row, {}) if isinstance(row, str) else row
    config = TrainerConfig(learning_rate=1e-3)
    return Learner(model, algorithm, config, temperature=0.7, reward_weights={}, seed=0)


def moved(model: Any, update: Callable[[], Update]) -> tuple[bool, Update]:
    before = weights_checksum(model)
    done = update()
    return weights_checksum(model) != before, done


def test_what_is_rejected_whole_moves_nothing_and_says_why(make: Any) -> None:
    model = make.model()
    row = build_algorithm("grpo", {"rejection.level": "trajectory"})
    learner = learner_of(model, row)
    assert moved(model, lambda: learner.update(sampled(model, make.random_groups(0), 0.7)))[0], "it has momentum now"
    changed, update = moved(model, lambda: learner.update(make.random_groups(1)))  # recorded by nobody's policy
    assert not changed and update.metrics.get("trust", 0.0) == 0
    assert {fate.reason for fate in update.fates if fate.reason != "zero variance"} == {REJECTED}


def test_imitation_without_anything_to_imitate_moves_nothing(make: Any) -> None:
    model = make.model()
    learner = learner_of(model, build_algorithm("grpo", {"imitation": 0.1, "filters.zero_variance": "none"}))
    learner.update(make.random_groups(0))
    turns = make.chain(([1], [2]))
    lost = make.groups(*(make.trajectory(turns, {"score": 0.0}, member=member) for member in range(3)))
    changed, update = moved(model, lambda: learner.update(lost))
    assert not changed and {fate.reason for fate in update.fates} == {NO_ADVANTAGE}


def test_an_attempt_out_of_turns_is_compared_with_and_not_learned_from(make: Any) -> None:
    turns = make.chain(([1], [2]))
    cut = make.trajectory(turns, {"score": 0.0}, member=1, status=Status.OUT_OF_TURNS, truncated=True)
    group = make.groups(make.trajectory(turns, {"score": 1.0}), cut)
    model = make.model()
    changed, update = moved(model, lambda: learner_of(model, "dapo").update(group))
    assert changed, "one success and one cut failure teach something"
    assert {fate.attempt.sample_index: (fate.fate, fate.reason) for fate in update.fates} == {
        0: ("trained", None),
        1: ("dropped", "overlong"),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda batch: batch.returns, "give one per token"),
        (lambda batch: batch.token_rewards / 0, "a number that is not finite"),
    ],
)
def test_an_advantage_of_a_user_that_is_none_is_told_in_a_line(given: Any, said: str, make: Any) -> None:
    class Mine(Advantage):
        formula = "mine"

        def estimate(self, batch: Any, signals: Any) -> Estimate:
            return Estimate(given(batch))

    learner = learner_of(make.model(), Algorithm(name="mine", advantage=Mine()))
    with pytest.raises(InvalidInput, match=said):
        learner.update(make.random_groups(0))
