"""What an episode earned, each reward as one number, at whatever level it was given."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.trajectory import Trajectory

Marks = Mapping[str, float | None]
"""By the name of a reward: its sum over the episode; None where it could not be scored."""


def marks_of(trajectory: Trajectory) -> Marks:
    """Rewards of the trajectory, of its turns and of their calls; a name belongs to one of these levels.

    Example:
        marks_of(trajectory) == {"em": 1.0, "found": 2.0}
    """
    marks: dict[str, float | None] = {
        name: sum(value) if isinstance(value, tuple) else value for name, value in trajectory.rewards.items()
    }
    for turn in trajectory.turns:
        for given in (turn.rewards, *turn.call_rewards):
            for name, value in given.items():
                marks[name] = (marks.get(name) or 0.0) + value
    return marks
