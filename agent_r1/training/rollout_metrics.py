"""Metrics of the attempts of one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from agent_r1.core.trajectory import STATUS_POLICY, Group, Status, Trajectory
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS


def compute_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the attempts of one step, with retried attempts and without greedy attempts:

    - one metric per status, such as ``completed``: number of attempts with this status.
    - ``retried``: number of failed attempts that were retried.
    - ``unscored``: number of attempts that ended normally, but have a reward that is missing or not finite.
    - ``calls``: number of tool calls.
    - ``invalid_calls``: number of tool calls that failed because of an error of the agent.
    - ``failed_calls``: number of tool calls that failed because of an error of the tool.
    - ``turns``: mean number of turns of an attempt.
    - ``branches``: mean number of branches of an attempt; 1 if each turn continues the turn before.
    - ``attempt_tokens``: mean number of sampled tokens of an attempt.
    """
    retried = [t for group in groups for t in group.retried if t.attempt.sample_index < len(group.trajectories)]
    trajectories = [*(t for group in groups for t in group.trajectories), *retried]
    statuses = Counter(trajectory.status for trajectory in trajectories)
    results = [result for trajectory in trajectories for turn in trajectory.turns for result in turn.results]
    invalid = sum(result.error in INVALID_CALL_KINDS for result in results)
    tokens = sum(len(turn.action_ids) for trajectory in trajectories for turn in trajectory.turns)
    counts = {
        **{status.value: statuses[status] for status in Status},
        "unscored": sum(map(_is_unscored, trajectories)),
        "retried": len(retried),
        "calls": len(results),
        "invalid_calls": invalid,
        "failed_calls": sum(not result.ok for result in results) - invalid,
        "turns": sum(len(trajectory.turns) for trajectory in trajectories) / max(len(trajectories), 1),
        "branches": sum(map(_num_branches, trajectories)) / max(len(trajectories), 1),
        "attempt_tokens": tokens / max(len(trajectories), 1),
    }
    return {name: float(count) for name, count in counts.items()}


def _num_branches(trajectory: Trajectory) -> int:
    return len(trajectory.turns) - len({turn.parent for turn in trajectory.turns} - {None})


def _is_unscored(trajectory: Trajectory) -> bool:
    values: list[float] = []
    for reward in trajectory.rewards.values():
        values += reward if isinstance(reward, tuple) else [math.nan if reward is None else reward]
    return STATUS_POLICY[trajectory.status] == "train" and not all(map(math.isfinite, values))
