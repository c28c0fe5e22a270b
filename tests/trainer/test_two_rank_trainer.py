"""Two ranks behind the trainer protocol compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from updating import update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.outcomes import Outcome, Trained
from agent_r1.trainer.protocol import Trainer
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from tests.trainer.two_rank_trainer import TwoRankTrainer

ALGORITHMS = {
    "grpo": build_algorithm("grpo", {"distillation.top_k": 4}),
    "ppo": build_algorithm("ppo", {}),
}
"""With a teacher, and with a critic."""
CONFIG = TrainerConfig(learning_rate=1e-2, critic_learning_rate=1e-2, minibatches=2)


def updater_of(trainer: Trainer, name: str) -> PolicyUpdater:
    return PolicyUpdater(trainer, ALGORITHMS[name], CONFIG, reward_weights={}, seed=0, steps=1000)


def weights_of(updater: PolicyUpdater) -> dict[str, torch.Tensor]:
    """Return the published weights."""
    handle = updater.publish().handle
    assert isinstance(handle, torch.nn.Module)
    return handle.state_dict()


def advantage_of(outcome: Outcome) -> float:
    """Return the sum of advantages of a trained attempt, NaN for an excluded one."""
    return outcome.advantage_sum if isinstance(outcome, Trained) else float("nan")


@pytest.fixture(params=ALGORITHMS)
def trainers(request: Any, make: Any) -> Iterator[tuple[str, SingleProcessTrainer, TwoRankTrainer]]:
    """The name of an algorithm, and its trainers of one and of two processes."""
    algorithm = ALGORITHMS[request.param]
    teacher = make.exact_model(seed=1) if "teacher" in algorithm.needs else None
    alone = SingleProcessTrainer(make.exact_model(), algorithm, CONFIG, temperature=0.7, teacher=teacher)
    ranks = TwoRankTrainer(make.exact_model(), algorithm, CONFIG, temperature=0.7, teacher=teacher)
    yield request.param, alone, ranks
    ranks.close()


def test_two_ranks_give_the_loss_gradient_norm_and_weights_of_one_process(trainers: Any, make: Any) -> None:
    name, *both = trainers
    alone, ranks = (updater_of(trainer, name) for trainer in both)
    for seed in range(2):
        expected, found = (update(updater, make.random_groups(seed)) for updater in (alone, ranks))
        term = {"grpo": "distillation_loss", "ppo": "value_loss"}[name]
        for metric in ("policy_loss", "policy_gradient_norm", term):
            assert found.metrics[metric] == pytest.approx(expected.metrics[metric], rel=1e-6, abs=1e-6), metric
        assert expected.metrics["policy_gradient_norm"] > 1e-3
        assert list(map(advantage_of, found.outcomes)) == pytest.approx(
            list(map(advantage_of, expected.outcomes)), nan_ok=True
        )
        assert found.version.number == expected.version.number == seed + 1
    single, served = (weights_of(updater) for updater in (alone, ranks))
    began = make.exact_model().state_dict()
    assert all(torch.allclose(tensor, served[key], rtol=1e-6, atol=1e-6) for key, tensor in single.items())
    assert any(not torch.allclose(tensor, began[key], atol=1e-3) for key, tensor in single.items())  # control


def test_the_state_of_two_ranks_continues_in_one_process(trainers: Any, make: Any) -> None:
    name, alone, ranks = trainers
    updater = updater_of(ranks, name)
    update(updater, make.random_groups(0))
    weights, state = weights_of(updater), updater.state()
    continued = updater_of(alone, name)
    continued.load_weights(weights)
    continued.load_state(state)
    expected, found = (update(one, make.random_groups(1)).metrics for one in (updater, continued))
    assert found["policy_gradient_norm"] == pytest.approx(expected["policy_gradient_norm"], rel=1e-6)
    with pytest.raises(RuntimeError, match="other weights"):  # an error of a rank reaches the caller
        ranks.load_state(replace(state, scalars={**state.scalars, "policy": "of other weights"}))
