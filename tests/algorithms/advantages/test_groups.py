"""Group-relative advantages in cases that the hand-computed batch does not cover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.trajectory import Trajectory
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


def batch_of(make: Any, weights: Mapping[str, float], *rewards: Mapping[str, float]) -> TrainingBatch:
    """Return a batch of attempts of one token at one task."""
    turns = make.chain(([1], [2]))
    trajectories = [make.trajectory(turns, one, member=member) for member, one in enumerate(rewards)]
    return assemble_batch(
        select_trainable(make.groups(*trajectories), weights).samples, pack_prefix_tree, "actions", weights
    )


def advantage_of(name: str, batch: TrainingBatch) -> Tensor:
    return ALGORITHMS[name].compute_token_weights(batch, ModelOutputs()).advantage


REWARDS = ({"em": 1.0, "len": 10.0}, {"em": 0.0, "len": 30.0}, {"em": 0.0, "len": 20.0})


def test_gdpo_weights_each_reward_after_standardizing_it(make: Any) -> None:
    # em: mean 1/3, std 0.577350: 1.154701, -0.577350, -0.577350; len: -1, 1, 0
    for weight in (1.0, 0.1, -0.5):
        batch = batch_of(make, {"len": weight}, *REWARDS)
        total = numbers(1.154701 - weight, -0.577350 + weight, -0.577350)
        expected = total / math.sqrt(float(total.square().sum()) / 2)
        assert close(advantage_of("gdpo", batch), expected, 1e-5), weight


def test_a_dominant_reward_hides_another_from_grpo_but_not_from_gdpo(make: Any) -> None:
    # only the first is right; the last is a little longer
    batch = batch_of(make, {}, {"em": 1.0, "len": 10.0}, {"em": 0.0, "len": 30.0}, {"em": 0.0, "len": 12.0})
    right, _, wrong = advantage_of("grpo", batch)
    assert right < wrong
    right, _, wrong = advantage_of("gdpo", batch)
    assert right > wrong


def test_pass_at_k_is_divided_by_the_standard_deviation_of_its_own_group(make: Any) -> None:
    turns, scores = make.chain(([1], [2])), (1.0, 0.0, 10.0, 0.0)
    attempts = [
        make.trajectory(turns, {"score": score}, group=place // 2, member=place % 2)
        for place, score in enumerate(scores)
    ]
    batch = assemble_batch(select_trainable(make.groups(*attempts), {}).samples, pack_prefix_tree)
    scaled = build_algorithm("pass-at-k", {"advantage.divide_by_std": True})
    found = scaled.compute_token_weights(batch, ModelOutputs()).advantage
    assert close(found, math.sqrt(2) * numbers(1, 0, 1, 0), 1e-5)


def test_pass_at_k_of_fewer_attempts_has_the_gradient_of_the_expected_maximum(make: Any) -> None:
    # a policy that succeeds with probability s(w): d/dw of 1 - (1 - s)^k, from all outcomes of four attempts
    attempts, k, p = 4, 2, 0.3
    algorithm = build_algorithm("pass-at-k", {"advantage.k": k})
    gradient = 0.0
    for outcome in product((0.0, 1.0), repeat=attempts):
        batch = batch_of(make, {}, *({"em": reward} for reward in outcome))
        advantage = algorithm.compute_token_weights(batch, ModelOutputs()).advantage.tolist()
        probability = math.prod(p if reward else 1 - p for reward in outcome)
        score = [reward - p for reward in outcome]  # d/dw of log pi, if p is the sigmoid of w
        gradient += probability * sum(one * pull for one, pull in zip(advantage, score, strict=True))
    assert gradient == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p))


def test_gpg_scales_as_if_groups_without_variance_were_left_out(make: Any) -> None:
    turns = make.chain(([1], [2]))
    scores = ((1.0, 0.0), (2.0, 2.0), (0.0, 3.0), (1.0, 1.0))
    attempts = [
        make.trajectory(turns, {"score": score}, group=group, member=member)
        for group, pair in enumerate(scores)
        for member, score in enumerate(pair)
    ]

    def pulls(name: str, attempts: Sequence[Trajectory], settings: Mapping[str, object]) -> list[float]:
        """Return advantage times loss weight of the tokens that have an advantage."""
        samples = select_trainable(make.groups(*attempts), {}).samples
        weights = build_algorithm(name, settings).compute_token_weights(
            assemble_batch(samples, pack_prefix_tree), ModelOutputs()
        )
        return [pull for pull in (weights.advantage * weights.loss_weight).tolist() if pull]

    varied = [attempt for attempt in attempts if attempt.attempt.group_id in (0, 2)]
    mean = {"advantage.scale": "none"}
    assert pulls("gpg", attempts, {}) == pytest.approx(pulls("gpg", varied, mean))
    assert pulls("gpg", attempts, {}) == pytest.approx([2 * pull for pull in pulls("gpg", attempts, mean)])
