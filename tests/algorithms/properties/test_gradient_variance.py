"""P12: if only the first of two turns matters, turn-level advantages have less variance than trajectory-level ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.data.batch import TrainingBatch, assemble_batch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable

ATTEMPTS = 4
"""Attempts per group."""

TRAJECTORY_NAMES = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
"""Algorithms that give all turns of an attempt the same advantage."""

TURN_NAMES = ("gigpo", "gtpo", "process-grpo", "reinforce", "ppo-turn")
"""Algorithms that give each turn its own advantage."""

Arms = tuple[int, int]
"""The choices of an attempt: 0 or 1 in each of its two turns."""

ALL_ARMS: tuple[Arms, ...] = tuple(product((0, 1), (0, 1)))


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Mean (2,) and variance (2,) over groups of the gradient with respect to the logits of the two turns."""

    mean: Tensor
    variance: Tensor

    @property
    def over_signal(self) -> float:
        """The variance of both divided by the squared length of the mean."""
        return float(self.variance.sum() / self.mean.square().sum())


def gradient_noise(algorithm: Algorithm, first: float, last: float, *, late: bool = False) -> GradientNoise:
    """Compute the noise for a policy that chooses arm 1 with probability ``first`` and ``last``.

    If ``late``, the reward of the first turn is given at the end, as an outcome of the whole episode.
    """
    probabilities = torch.tensor([first, last], dtype=torch.float64)  # (2,)
    group_probabilities, gradients = [], []
    for arms in combinations_with_replacement(ALL_ARMS, ATTEMPTS):
        chosen = torch.tensor(arms, dtype=torch.float64)  # (ATTEMPTS, 2)
        of_arms = torch.where(chosen > 0, probabilities, 1 - probabilities)
        group_probabilities.append(_orders(arms) * of_arms.prod())
        gradients.append(_gradient(algorithm, _batch(arms, late), chosen, probabilities))
    weight, gradient = torch.stack(group_probabilities)[:, None], torch.stack(gradients)  # (groups, 1), (groups, 2)
    mean = (weight * gradient).sum(0)
    return GradientNoise(mean, (weight * (gradient - mean).square()).sum(0))


def _orders(arms: Sequence[Arms]) -> int:
    """Return the number of orders of the attempts of a group; no estimator depends on the order."""
    return factorial(len(arms)) // prod(factorial(count) for count in Counter(arms).values())


def _gradient(algorithm: Algorithm, batch: TrainingBatch, chosen: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient (2,) of the objective with respect to the logits: that of log pi(arm) is arm - pi(1).

    The critic, if there is one, knows the true values.
    """
    values = torch.tensor([probabilities[0], 0.0], dtype=torch.float64).repeat(ATTEMPTS)
    outputs = ModelOutputs(
        values=StateValues(values, torch.zeros_like(values)), reference_logprobs=batch.sampler_logprobs
    )
    weights = algorithm.compute_token_weights(batch, outputs)
    return ((weights.loss_weight * weights.advantage).view(-1, 2) * (chosen - probabilities)).sum(0)


@cache
def _batch(arms: Sequence[Arms], late: bool) -> TrainingBatch:
    attempts = tuple(_attempt(chosen, index, late) for index, chosen in enumerate(arms))
    return assemble_batch(select_trainable([Group(0, Task("bandit", ()), attempts)], {}).samples, pack_prefix_tree)


def _attempt(arms: Arms, index: int, late: bool) -> Trajectory:
    """Return the trajectory of these choices. Observations do not depend on the arm."""
    reward = float(arms[0])
    turns = tuple(
        Turn(
            index=turn,
            parent=turn - 1 if turn else None,
            new_ids=(turn,),
            action_ids=(arm,),
            logprobs=(0.0,),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(str(arm)), str(arm)),
            observation=(Message.user("again"),),
            rewards={"reward": 0.0 if late or turn else reward},
        )
        for turn, arm in enumerate(arms)
    )
    rewards = {"reward": reward} if late else {}
    return Trajectory(AttemptId("bandit", "bandit", 0, index), "bandit", turns, Status.COMPLETED, rewards=rewards)


NoiseFn = Callable[[float, float], Any]
"""Probabilities of arm 1 in the two turns -> ``GradientNoise``."""

PROBABILITIES = st.sampled_from([0.2, 0.35, 0.5, 0.65, 0.8])
TURN_LEVEL = ["gigpo", "gtpo", "reinforce", "ppo-turn"]


def noise_of(algorithm: Algorithm, *, late: bool = False) -> NoiseFn:
    """Return the exact gradient noise of an algorithm; if ``late``, the first turn's reward is given at the end."""
    return lru_cache(lambda first, last: gradient_noise(algorithm, first, last, late=late))


TRAJECTORY_LEVEL = [noise_of(ALGORITHMS[name]) for name in TRAJECTORY_NAMES]


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


@pytest.mark.parametrize("name", [*TRAJECTORY_NAMES, *TURN_NAMES])
def test_every_gradient_has_the_right_mean_direction(name: str) -> None:
    holds(has_the_right_mean_direction, noise_of(ALGORITHMS[name]), PROBABILITIES, PROBABILITIES, count=2)


def test_a_return_without_later_rewards_is_detected() -> None:
    advantage = ALGORITHMS["reinforce"].advantage.model_copy(update={"gamma": 0.0})
    shortsighted = ALGORITHMS["reinforce"].model_copy(update={"advantage": advantage})
    noise = noise_of(shortsighted, late=True)
    rejected(has_the_right_mean_direction, noise, PROBABILITIES, PROBABILITIES, count=2)


def test_comparing_turns_of_equal_number_gives_the_last_turn_no_gradient_at_all() -> None:
    found = gradient_noise(ALGORITHMS["gtpo"], 0.35, 0.65)
    assert found.variance[1] == 0.0 < found.variance[0]
    grpo = gradient_noise(ALGORITHMS["grpo"], 0.35, 0.65)
    assert grpo.variance[1] > 0.001  # control: trajectory-level advantages do
