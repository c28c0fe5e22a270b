"""How the attempts of a step ended, counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from agent_r1.core.trajectory import STATUS_POLICY, Group, Status, Trajectory
from agent_r1.tools.tool_errors import INVALID_CALLS


def tally(groups: Sequence[Group]) -> dict[str, float]:
    """Attempts by the name of each status, and what became of their calls.

    All that were lived to be compared count, with those in whose place another was tried (``retried``); greedy ones do
    not. ``unscored`` are those that ended well and have a reward that is missing or not finite. A call that failed is
    no ending: ``invalid_calls`` are the agent's fault, ``failed_calls`` the tool's.

    Example:
        tally(groups) == {"completed": 15.0, "engine_failed": 1.0, .., "retried": 1.0, "calls": 31.0, ..}
    """
    retried = [t for group in groups for t in group.retried if t.attempt.member < len(group.trajectories)]
    lived = [*(t for group in groups for t in group.trajectories), *retried]
    ended = Counter(trajectory.status for trajectory in lived)
    results = [result for trajectory in lived for turn in trajectory.turns for result in turn.results]
    invalid = sum(result.error in INVALID_CALLS for result in results)
    counts = {
        **{status.value: ended[status] for status in Status},
        "unscored": sum(map(_unscored, lived)),
        "retried": len(retried),
        "calls": len(results),
        "invalid_calls": invalid,
        "failed_calls": sum(not result.ok for result in results) - invalid,
    }
    return {name: float(count) for name, count in counts.items()}


def _unscored(trajectory: Trajectory) -> bool:
    return STATUS_POLICY[trajectory.status] == "train" and not all(map(math.isfinite, _numbers(trajectory)))


def _numbers(trajectory: Trajectory) -> Iterator[float]:
    for reward in trajectory.rewards.values():
        yield from reward if isinstance(reward, tuple) else (math.nan if reward is None else reward,)
