"""Total rewards of an episode, one number per reward, whether it was given per trajectory, turn or call."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.trajectory import Trajectory

RewardTotals = Mapping[str, float | None]
"""The sum of each reward over the episode, by name; None if the reward could not be computed."""


def sum_rewards(trajectory: Trajectory) -> RewardTotals:
    """Return the totals of all rewards: of the trajectory, of its turns and of their calls.

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
