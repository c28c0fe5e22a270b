"""Advantages and value targets with a critic: truncated episodes, targets, and the critic's warmup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import close, numbers
from torch import Tensor
from updating import make_updater, update

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, StateValues, ValueTargets
from agent_r1.core.trajectory import Group, Status
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer.updater import Trained

VALUES, AFTER_ACTION = numbers(0.2, 0.4, 0.6, 0.3), numbers(0.5, 0.9, 0.7)
HALF = {"advantage.gamma": 0.5, "advantage.lam": 0.5}


@pytest.fixture
def batch(make: Any) -> TrainingBatch:
    turns = make.chain(([1], [2, 3]), ([4], [5]))
    truncated = make.trajectory(turns, {"score": 0.1}, status=Status.OUT_OF_TURNS, truncated=True)
    completed = make.trajectory(make.chain(([1], [6])), {"score": 1.0}, member=1)
    return assemble_batch(select_trainable(make.groups(truncated, completed), {}).samples, pack_prefix_tree)


def whitened(raw: Tensor, over: Tensor) -> Tensor:
    return (raw - over.mean()) / over.std()


def advantage_and_targets(algorithm: Algorithm, batch: TrainingBatch) -> tuple[Tensor, ValueTargets]:
    weights = algorithm.compute_token_weights(batch, ModelOutputs(values=StateValues(VALUES, AFTER_ACTION)))
    assert weights.value_targets is not None
    return weights.advantage, weights.value_targets


def test_a_truncated_episode_continues_with_the_critics_value_of_its_last_state(batch: TrainingBatch) -> None:
    for bootstrap in (False, True):
        algorithm = build_algorithm("ppo", {**HALF, "advantage.bootstrap": bootstrap})
        after = 0.9 if bootstrap else 0.0
        third = 0.1 + 0.5 * after - 0.6
        second = 0.5 * 0.6 - 0.4 + 0.25 * third
        raw = numbers(0.5 * 0.4 - 0.2 + 0.25 * second, second, third, 1 - 0.3)  # a completed episode continues with 0
        advantage, targets = advantage_and_targets(algorithm, batch)
        assert close(advantage, whitened(raw, raw), 1e-6)
        assert close(targets.target.before_token, raw + VALUES)


def test_gae_over_turns_bootstraps_too(batch: TrainingBatch) -> None:
    algorithm = build_algorithm("ppo-turn", {**HALF, "advantage.bootstrap": True})
    second = 0.1 + 0.5 * 0.9 - 0.6
    turns = numbers(0.5 * 0.6 - 0.2 + 0.25 * second, second, 0.7)
    advantage, targets = advantage_and_targets(algorithm, batch)
    assert close(advantage, whitened(turns, turns)[batch.token_turn], 1e-6)
    assert close(targets.target.before_token[[0, 2, 3]], turns + VALUES[[0, 2, 3]])
    # only states before turns have targets
    assert close(targets.weight.before_token, numbers(1 / 3, 0, 1 / 3, 1 / 3))


def test_bi_level_gae_bootstraps_too(batch: TrainingBatch) -> None:
    algorithm = build_algorithm("bi-level-gae", {"advantage.turn_gamma": 0.5, "advantage.bootstrap": True})
    second = 0.1 + 0.5 * 0.9 - 0.6
    first = 0.5 * 0.6 - 0.2 + 0.5 * second
    raw = numbers(first, first + 0.2 - 0.4, second, 0.7)
    assert close(advantage_and_targets(algorithm, batch)[0], whitened(raw, raw), 1e-6)


@pytest.mark.parametrize("name", ["ppo", "ppo-turn"])
def test_states_after_actions_have_targets_if_it_is_known_what_follows(name: str, batch: TrainingBatch) -> None:
    _, targets = advantage_and_targets(build_algorithm(name, {**HALF, "advantage.bootstrap": True}), batch)
    # after the first turn the value of the second; after the truncation unknown; after the end 0
    assert close(targets.target.after_action[[0, 2]], numbers(0.1 + 0.5 * 0.9, 0))
    assert close(targets.weight.after_action, numbers(0.5, 0, 0.5))
    _, targets = advantage_and_targets(build_algorithm(name, HALF), batch)
    assert targets.weight.after_action.tolist() == [0, 0, 0]  # without bootstrap they are not used


def test_the_critic_learns_that_a_terminal_state_has_value_zero(make: Any) -> None:
    groups = make.groups(
        *(make.trajectory(make.chain(([1], [2 + member])), {"score": 1.0}, member=member) for member in range(4))
    )

    def critic(bootstrap: bool) -> ValueModel:
        settings = {"advantage.bootstrap": bootstrap, "advantage.value_clip": 100.0}
        return train_critic(make, build_algorithm("ppo", settings), groups, updates=40)[0]

    supervised, unsupervised = (critic(bootstrap)(torch.tensor([[1, 2], [1, 4]])) for bootstrap in (True, False))
    for values in (supervised, unsupervised):
        assert close(values[:, 0], torch.ones(2), 0.1)
    assert supervised[:, 1].abs().max() < 0.1 < unsupervised[:, 1].abs().min()


def train_critic(
    make: Any, algorithm: Algorithm, groups: list[Group], updates: int
) -> tuple[ValueModel, list[str], list[int]]:
    """Return the critic after some updates, and the policy's checksums and versions before and after each."""
    model = make.model()
    updater = make_updater(model, algorithm, learning_rate=1e-3, critic_learning_rate=1e-2)
    checksums, versions = [weights_checksum(model)], [0]
    for _ in range(updates):
        versions.append(update(updater, groups).version.number)
        checksums.append(weights_checksum(model))
    critic = build_value_model(model)
    tensors = updater.state().tensors
    critic.load_state_dict({name: tensors[f"critic.{name}"] for name, _ in critic.named_parameters()}, strict=False)
    return critic, checksums, versions


def test_during_warmup_only_the_critic_is_trained(make: Any) -> None:
    groups = make.random_groups(0)
    algorithm = build_algorithm("ppo", {"advantage.warmup": 2})
    critic, checksums, versions = train_critic(make, algorithm, groups, updates=4)
    assert len(set(checksums)) == 3 and versions == [0, 0, 0, 1, 2]
    assert critic.head.weight.abs().max() > 1e-3
    report = update(make_updater(make.model(), "vapo"), groups)
    assert all(isinstance(outcome, Trained) for outcome in report.outcomes)
    assert "critic_gradient_norm" in report.metrics and "policy_gradient_norm" not in report.metrics
