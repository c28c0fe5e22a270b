"""The scorer of ``code-repair``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.rewards.answers import final_answer
from agent_r1.sandbox import Sandbox
from agent_r1.tasksets.code_repair.bugs import Bug
from agent_r1.tasksets.code_repair.edits import apply_edit
from agent_r1.tasksets.code_repair.examples import PASSED
from agent_r1.tasksets.code_repair.tool import TRY, bug_of

_log = logging.getLogger(__name__)

Results = tuple[bool | None, ...]
"""The result of each hidden test: True if it passes, False if it fails, None if it could not be run."""


class RepairScorer:
    """A scorer with three rewards. A reward is None if the sandbox failed, and 0 without a valid edit.

    - ``fixed``: 1 if the final function (after the edit in the final answer) passes all hidden tests; else 0.
    - ``gained``: max(0, (p - b) / (n - b)). Of n hidden tests, the final function passes p, and the function with the
      bug passes b.
    - ``first_fixed``: like ``fixed``, for the first edit that was tried. Without a tried edit, the value of ``fixed``.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.sandbox = sandbox.isolation

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        bug = bug_of(task)
        pairs = [(final_function(trajectory, bug), first_function(trajectory, bug)) for trajectory in group]
        different = sorted({source for pair in pairs for source in pair if source is not None})
        graded = await asyncio.gather(*(self._grade(bug, source) for source in different))
        results = dict(zip(different, graded, strict=True))
        for source, result in results.items():
            if None in result:
                _log.warning("a repair of %s could not be judged: %s", task.id, source.splitlines()[0])
        return tuple(
            {
                "fixed": _fixed(results.get(final or "")),
                "gained": _gained(results.get(final or ""), bug),
                "first_fixed": _fixed(results.get(first or "")),
            }
            for final, first in pairs
        )

    async def _grade(self, bug: Bug, source: str) -> Results:
        verdicts = await asyncio.gather(*(exam.judge(self._sandbox, source) for exam in bug.exams))
        return tuple(verdict.passed for verdict in verdicts)


def final_function(trajectory: Trajectory, bug: Bug) -> str | None:
    """Return the function of ``bug`` after the edit in the final answer; None without a valid edit."""
    text = final_answer(trajectory)
    return None if text is None else apply_edit(bug.source, bug.proposals, text)


def first_function(trajectory: Trajectory, bug: Bug) -> str | None:
    """Return the function of ``bug`` after the first edit of the attempt.

    The first edit is in the first call of the tool or, if there is no call, in the final answer. Return None if the
    edit is missing or invalid, or changes nothing.
    """
    for turn in trajectory.env_turns:
        for call, _ in zip(turn.action.message.calls, turn.results, strict=False):  # calls of the last turn are not run
            edit = (call.arguments or {}).get("edit")
            if call.name == TRY and isinstance(edit, str):
                return apply_edit(bug.source, bug.proposals, edit)
    return final_function(trajectory, bug)


def first_try(trajectory: Trajectory) -> tuple[bool, bool] | None:
    """Return (passed, kept) for the first edit that the tool tested; None if the tool tested no edit.

    ``passed``: the visible test passed. ``kept``: the final answer is this edit.
    """
    for turn in trajectory.env_turns:
        for call, result in zip(turn.action.message.calls, turn.results, strict=False):
            edit = (call.arguments or {}).get("edit")
            if call.name == TRY and isinstance(edit, str) and result.ok:
                text = "".join(part.text for part in result.parts if isinstance(part, Text))
                return text.startswith(PASSED), (final_answer(trajectory) or "").strip() == edit.strip()
    return None


def repair_rates(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return how often the first edit was right, and how attempts use the results of the tool.

    The first edit is in the first call of the tool or, without a call, in the final answer.

    - ``first_fix_rate``: of all attempts, the share whose first edit repairs the function.
    - ``corrected_rate``: of the attempts with a wrong first edit, the share whose final answer repairs the function.
    - ``kept_after_pass``: of the attempts whose first tested edit passed the visible test, the share that kept this
      edit as the final answer.
    - ``kept_after_fail``: of the attempts whose first tested edit failed the visible test, the share that kept this
      edit as the final answer.

    The last two shares are equal for an agent that ignores the tool. Attempts that could not be graded are ignored. A
    rate is left out if there are no attempts from which to compute the rate.
    """
    judged = [t for t in trajectories if None not in (_of(t, "fixed"), _of(t, "first_fixed"))]
    tries = [found for found in map(first_try, judged) if found is not None]
    shares = {
        "first_fix_rate": [_of(t, "first_fixed") == 1 for t in judged],
        "corrected_rate": [_of(t, "fixed") == 1 for t in judged if _of(t, "first_fixed") == 0],
        "kept_after_pass": [kept for passed, kept in tries if passed],
        "kept_after_fail": [kept for passed, kept in tries if not passed],
    }
    return {name: fmean(found) for name, found in shares.items() if found}


def _of(trajectory: Trajectory, name: str) -> Any:
    return trajectory.rewards.get(name)


def _fixed(results: Results | None) -> float | None:
    if results is None:
        return 0.0
    return None if None in results else float(all(results))


def _gained(results: Results | None, bug: Bug) -> float | None:
    if results is None:
        return 0.0
    if None in results:
        return None
    before = sum(bug.passes)
    return max(0.0, (sum(map(bool, results)) - before) / (len(results) - before))
