"""Sums of the rewards of an episode, and their means over attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from agent_r1.core.trajectory import Trajectory
from agent_r1.core.weighted_rewards import can_be_summed

REWARD_MEAN = "reward/"
"""The prefix of metrics that are means of rewards, such as ``reward/em``."""

RewardTotals = Mapping[str, float | None]
"""The total of each reward of an episode, by name; None if it could not be computed."""


def sum_rewards(trajectory: Trajectory) -> RewardTotals:
    """Return the total of each reward by name.

    A total is one sum over the whole attempt: the values of the trajectory, of all turns and of all calls are added.

    Example:
        sum_rewards(trajectory) == {"em": 1.0, "found": 2.0}
    """
    totals: dict[str, float | None] = {
        name: sum(value) if isinstance(value, tuple) else value for name, value in trajectory.rewards.items()
    }
    for turn in trajectory.turns:
        for rewards in (turn.rewards, *turn.call_rewards):
            for name, value in rewards.items():
                totals[name] = (totals.get(name) or 0.0) + value
    return totals


def reward_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the mean of each reward over the scored attempts, as metrics named ``reward/NAME``.

    A missing reward counts as 0. A reward that is not a finite number is left out of its mean.

    Example:
        reward_means(trajectories) == {"reward/em": 0.25, "reward/found": 0.8}
    """
    totals = [sum_rewards(trajectory) for trajectory in trajectories if trajectory.rewards]
    means = {}
    for name in dict.fromkeys(name for total in totals for name, value in total.items() if value is not None):
        values = [value for total in totals if (value := total.get(name, 0.0)) is not None and can_be_summed(value)]
        if values:
            means[f"{REWARD_MEAN}{name}"] = math.fsum(values) / len(values)
    return means
