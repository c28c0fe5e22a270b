"""P12: if only the first of two turns matters, turn-level advantages have less variance than trajectory-level ones."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree

ATTEMPTS = 4
TRAJECTORY_LEVEL = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
TURN_LEVEL = ("gigpo", "gtpo", "reinforce", "ppo-turn")

Arms = tuple[int, int]
"""The choices of an attempt: 0 or 1 in each of its two turns. Arm 1 of the first turn has a reward."""


def mean_and_variance(
    make: Any, algorithm: Algorithm, first: float, last: float, *, late: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the exact mean (2,) and variance (2,) of the gradient with respect to the logits of the two turns.

    The policy chooses arm 1 with probability ``first`` and ``last``. If ``late``, the reward is an outcome.
    """
    probabilities = torch.tensor([first, last], dtype=torch.float64)  # (2,)
    group_probabilities, gradients = [], []
    for arms in combinations_with_replacement(tuple(product((0, 1), (0, 1))), ATTEMPTS):
        orders = factorial(ATTEMPTS) // prod(factorial(count) for count in Counter(arms).values())
        chosen = torch.tensor(arms, dtype=torch.float64)  # (ATTEMPTS, 2)
        group_probabilities.append(orders * torch.where(chosen > 0, probabilities, 1 - probabilities).prod())
        batch = batch_of(make, arms, late)
        values = torch.tensor([first, 0.0], dtype=torch.float64).repeat(ATTEMPTS)  # a critic knows the true values
        state_values = StateValues(values, torch.zeros_like(values))
        weights = algorithm.compute_token_weights(batch, ModelOutputs(None, state_values, batch.sampler_logprobs))
        # the gradient of log pi(arm) with respect to the logit is arm - pi(1)
        gradients.append(((weights.loss_weight * weights.advantage).view(-1, 2) * (chosen - probabilities)).sum(0))
    weight, gradient = torch.stack(group_probabilities)[:, None], torch.stack(gradients)  # (groups, 1), (groups, 2)
    mean = (weight * gradient).sum(0)
    return mean, (weight * (gradient - mean).square()).sum(0)


@cache
def batch_of(make: Any, arms: tuple[Arms, ...], late: bool) -> TrainingBatch:
    attempts = []
    for member, (first, last) in enumerate(arms):
        rewards = {"reward": 0.0 if late else float(first)}
        turns = (make.turn(0, [0], [first], rewards=rewards), make.turn(1, [1], [last], parent=0))
        attempts.append(make.trajectory(turns, {"outcome": float(first)} if late else {}, member=member))
    return assemble_batch(select_trainable(make.groups(*attempts), {}).samples, pack_prefix_tree)


def noise(make: Any, name: str, first: float, last: float, *, late: bool = False) -> float:
    mean, variance = mean_and_variance(make, ALGORITHMS[name], first, last, late=late)
    return float(variance.sum() / mean.square().sum())


@pytest.mark.parametrize("name", TURN_LEVEL)
def test_turn_level_advantages_have_less_noise(name: str, make: Any) -> None:
    probabilities = ((0.2, 0.65), (0.5, 0.5), (0.8, 0.35))
    least = [min(noise(make, other, *pair) for other in TRAJECTORY_LEVEL) for pair in probabilities]
    assert all(noise(make, name, *pair) < limit for pair, limit in zip(probabilities, least, strict=True))
    late = [noise(make, name, *pair, late=True) for pair in probabilities]
    assert any(found >= limit for found, limit in zip(late, least, strict=True))  # control: the reward is an outcome


@pytest.mark.parametrize("name", [*TRAJECTORY_LEVEL, *TURN_LEVEL, "process-grpo"])
def test_every_gradient_has_the_right_mean_direction(name: str, make: Any) -> None:
    mean, _ = mean_and_variance(make, ALGORITHMS[name], 0.35, 0.65)
    assert mean[0] > 0 and abs(mean[1]) < 1e-12  # towards the better arm in the first turn, and 0 in the last
