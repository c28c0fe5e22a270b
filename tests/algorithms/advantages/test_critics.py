"""Credit with a critic: where episodes were cut, what it is taught, and that it may learn alone at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, ValueTargets
from agent_r1.core.trajectory import Group, Status
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.model.checksum import weights_checksum
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import Learner

VALUES, ENDS = numbers(0.2, 0.4, 0.6, 0.3), numbers(0.5, 0.9, 0.7)
HALF = {"advantage.gamma": 0.5, "advantage.lam": 0.5}


@pytest.fixture
def batch(make: Any) -> TrainingBatch:
    """One attempt of 2 tokens and 1 that earned 0.1 in the end and was cut; one of 1 token that earned 1 and ended."""
    turns = make.chain(([1], [2, 3]), ([4], [5]))
    cut = make.trajectory(turns, {"score": 0.1}, status=Status.OUT_OF_TURNS, truncated=True)
    ended = make.trajectory(make.chain(([1], [6])), {"score": 1.0}, member=1)
    return assemble(select_trainable(make.groups(cut, ended), {}).samples, pack_prefix_tree)


def whitened(raw: Tensor, over: Tensor) -> Tensor:
    return (raw - over.mean()) / over.std()


def credit(row: Algorithm, batch: TrainingBatch) -> tuple[Tensor, ValueTargets]:
    found = row.compute_token_weights(batch, ModelOutputs(values=VALUES, ends=ENDS))
    assert found.value_targets is not None
    return found.advantage, found.value_targets


def test_a_cut_episode_goes_on_with_the_critics_value_of_where_it_stopped(batch: TrainingBatch) -> None:
    for bootstrap in (False, True):
        row = build_algorithm("ppo", {**HALF, "advantage.bootstrap": bootstrap})
        after = 0.9 if bootstrap else 0.0
        third = 0.1 + 0.5 * after - 0.6
        second = 0.5 * 0.6 - 0.4 + 0.25 * third
        raw = numbers(0.5 * 0.4 - 0.2 + 0.25 * second, second, third, 1 - 0.3)  # what ended by itself goes on with 0
        advantage, targets = credit(row, batch)
        assert close(advantage, whitened(raw, raw), 1e-6)
        assert close(targets.tokens, raw + VALUES)


def test_over_turns_too(batch: TrainingBatch) -> None:
    row = build_algorithm("ppo-turn", {**HALF, "advantage.bootstrap": True})
    second = 0.1 + 0.5 * 0.9 - 0.6
    turns = numbers(0.5 * 0.6 - 0.2 + 0.25 * second, second, 0.7)
    advantage, targets = credit(row, batch)
    assert close(advantage, whitened(turns, turns)[batch.token_turn], 1e-6)
    assert close(targets.tokens[[0, 2, 3]], turns + VALUES[[0, 2, 3]])
    assert close(targets.token_shares, numbers(1 / 3, 0, 1 / 3, 1 / 3))  # only states before turns are supervised


def test_and_over_turns_of_tokens(batch: TrainingBatch) -> None:
    row = build_algorithm("bi-level-gae", {"advantage.turn_gamma": 0.5, "advantage.bootstrap": True})
    second = 0.1 + 0.5 * 0.9 - 0.6
    first = 0.5 * 0.6 - 0.2 + 0.5 * second
    raw = numbers(first, first + 0.2 - 0.4, second, 0.7)
    assert close(credit(row, batch)[0], whitened(raw, raw), 1e-6)


@pytest.mark.parametrize("name", ["ppo", "ppo-turn"])
def test_the_states_that_actions_lead_to_are_supervised_where_it_is_known_what_follows(name: str, batch: TrainingBatch) -> None:
    _, targets = credit(build_algorithm(name, {**HALF, "advantage.bootstrap": True}), batch)
    # after the first turn comes what the second was worth; after the cut nobody knows; after the end nothing
    assert close(targets.post_action_states[[0, 2]], numbers(0.1 + 0.5 * 0.9, 0))
    assert close(targets.end_shares, numbers(0.5, 0, 0.5))
    _, targets = credit(build_algorithm(name, HALF), batch)
    assert targets.end_shares.tolist() == [0, 0, 0]  # nobody asks for them without bootstrap


def test_it_learns_that_nothing_follows_an_ending(make: Any) -> None:
    groups = make.groups(
        *(make.trajectory(make.chain(([1], [2 + member])), {"score": 1.0}, member=member) for member in range(4))
    )

    def critic(bootstrap: bool) -> ValueModel:
        row = build_algorithm("ppo", {"advantage.bootstrap": bootstrap, "advantage.value_clip": 100.0})
        return trained(make, row, groups, updates=60)[0]

    supervised, left_alone = (critic(bootstrap)(torch.tensor([[1, 2], [1, 4]])) for bootstrap in (True, False))
    for before in (supervised, left_alone):
        assert close(before[:, 0], torch.ones(2), 0.1)
    assert supervised[:, 1].abs().max() < 0.1 < left_alone[:, 1].abs().min()


def trained(make: Any, row: Algorithm, groups: list[Group], updates: int) -> tuple[ValueModel, list[str], list[int]]:
    """The critic after so many updates; the policy's checksum before each and at the end, and its version."""
    model = make.model()
    config = TrainerConfig(learning_rate=1e-3, critic_learning_rate=1e-2)
    learner = Learner(model, row, config, temperature=1.0, reward_weights={}, seed=0)
    digests, versions = [weights_checksum(model)], [0]
    for _ in range(updates):
        versions.append(learner.update(groups).version)
        digests.append(weights_checksum(model))
    critic = build_value_model(model)
    weights = learner.state().tensors
    critic.load_state_dict({name: weights[f"critic.{name}"] for name, _ in critic.named_parameters()}, strict=False)
    return critic, digests, versions


def test_in_the_warm_up_the_critic_learns_alone(make: Any) -> None:
    groups = make.random_groups(0)
    row = build_algorithm("ppo", {"advantage.warmup": 2})
    critic, digests, versions = trained(make, row, groups, updates=2)
    assert len(set(digests)) == 1 and versions == [0, 0, 0]
    assert critic.head.weight.abs().max() > 1e-3
    _, digests, versions = trained(make, row, groups, updates=4)
    assert len(set(digests)) == 3 and versions == [0, 0, 0, 1, 2]
    _, digests, versions = trained(make, build_algorithm("ppo", {}), groups, updates=2)  # control
    assert len(set(digests)) == 3 and versions == [0, 1, 2]


def test_attempts_of_the_warm_up_are_trained_on(make: Any) -> None:
    learner = Learner(make.model(), build_algorithm("vapo", {}), TrainerConfig(), temperature=1.0, reward_weights={}, seed=0)
    update = learner.update(make.random_groups(0))
    assert {fate.fate for fate in update.fates} == {"trained"}
    assert "critic_gradient_norm" in update.metrics and "policy_gradient_norm" not in update.metrics


def test_explained_variance_tells_whether_the_critic_knew(make: Any) -> None:
    config = TrainerConfig(learning_rate=1e-9, critic_learning_rate=1e-2)
    learner = Learner(make.model(), build_algorithm("ppo", {}), config, temperature=1.0, reward_weights={}, seed=0)
    groups = make.random_groups(0)
    known = [learner.update(groups).metrics["explained_variance"] for _ in range(60)]
    assert known[0] == pytest.approx(0.0, abs=1e-6) and known[-1] > 0.8
