"""The weighted rewards of a trajectory, and their sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from agent_r1.core.trajectory import STATUS_POLICY, Trajectory

T = TypeVar("T")

MAX_REWARD = 1e300
"""The largest absolute value of a reward that counts as finite. No sum of such rewards overflows."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward, multiplied by its weight.

    Attributes:
        turn: the index of the turn; None for a reward of the whole trajectory.
        call: the index of the tool call in the turn; None for a reward of the whole turn or trajectory.
    """

    name: str
    value: float
    turn: int | None = None
    call: int | None = None


def with_weights(rewards: Mapping[str, T], weights: Mapping[str, float]) -> Iterator[tuple[str, float, T]]:
    """Yield (name, weight, value) of each reward whose weight is not 0. A reward without a weight has weight 1."""
    for name, value in rewards.items():
        if weight := weights.get(name, 1.0):
            yield name, weight, value


def weighted_rewards(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[WeightedReward]:
    """Yield each reward of a trajectory, multiplied by its weight. Skip rewards of weight 0, and rewards that are None.

    A reward that is not in ``weights`` has weight 1.
    """
    for number, turn in enumerate(trajectory.turns):
        for name, weight, value in with_weights(turn.rewards, weights):
            yield WeightedReward(name, weight * value, number)
        for call, rewards in enumerate(turn.call_rewards):
            for name, weight, value in with_weights(rewards, weights):
                yield WeightedReward(name, weight * value, number, call)
    for name, weight, reward in with_weights(trajectory.rewards, weights):
        if isinstance(reward, tuple):  # one number per turn
            for turn, value in zip(trajectory.turns_for_rewards(len(reward)) or (), reward, strict=False):
                yield WeightedReward(name, weight * value, turn.index)
        elif reward is not None:
            yield WeightedReward(name, weight * reward)


def can_be_summed(value: float) -> bool:
    """Return whether the absolute value of a reward is at most ``MAX_REWARD``. NaN gives False."""
    return abs(value) <= MAX_REWARD


def total_reward(trajectory: Trajectory, weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of all rewards of a trajectory (its return R).

    A reward that is not in ``weights`` has weight 1. Rewards of weight 0 are ignored.

    Return None if the attempt failed, or if a reward could not be computed or is not finite.
    """
    missing = any(reward is None for _, _, reward in with_weights(trajectory.rewards, weights))
    if missing or STATUS_POLICY[trajectory.status] != "train":
        return None
    values = [reward.value for reward in weighted_rewards(trajectory, weights)]
    return math.fsum(values) if all(map(can_be_summed, values)) else None
