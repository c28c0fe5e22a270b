"""The scorer and the measures of the task set ``code-repair``: the agent repairs a function that contains a bug."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.rewards.scoring import final_answer
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code_repair.bugs import Bug
from agent_r1.tasksets.code_repair.edits import apply_edit
from agent_r1.tasksets.code_repair.examples import PASSED
from agent_r1.tasksets.code_repair.tool import TRY, bug_of

_log = logging.getLogger(__name__)

Results = tuple[bool | None, ...]
"""The result of each hidden test: True if the test passes, False if the test fails, None if the test did not run."""


class RepairScorer:
    """A scorer with three rewards for the repair of a function that contains a bug.

    An edit of the agent replaces one line of the function. The agent sees one test of the function. The rewards come
    from the other tests, the hidden tests. There are n hidden tests, and the function with the bug passes b of them.

    - ``fixed``: 1 if the function passes all hidden tests after the edit in the final answer; else 0.
    - ``gained``: after the edit in the final answer, the function passes p hidden tests. The reward is
      max(0, (p - b) / (n - b)).
    - ``first_fixed``: 1 if the function passes all hidden tests after the first edit; else 0. The first edit is in the
      first call of the tool ``try`` or, without a call, in the final answer.

    Each reward is computed from one edit. If this edit is missing or invalid, the reward is 0. If a hidden test did not
    run because the sandbox failed, the reward is None.
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
    """Return the source of the function after the edit in the agent's final answer; None without a valid edit.

    ``bug`` contains the function before the edit.
    """
    text = final_answer(trajectory)
    return None if text is None else apply_edit(bug.source, bug.proposals, text)


def first_function(trajectory: Trajectory, bug: Bug) -> str | None:
    """Return the source of the function after the agent's first edit; None if the edit is missing or invalid.

    ``bug`` contains the function before the edit. The agent can try edits with the tool ``try``. The first edit is in
    the first call of ``try`` or, without a call, in the final answer. An edit that changes nothing is invalid.
    """
    for turn in trajectory.env_turns:
        for call, _ in zip(turn.action.message.calls, turn.results, strict=False):  # calls of the last turn are not run
            edit = (call.arguments or {}).get("edit")
            if call.name == TRY and isinstance(edit, str):
                return apply_edit(bug.source, bug.proposals, edit)
    return final_function(trajectory, bug)


def first_try(trajectory: Trajectory) -> tuple[bool, bool] | None:
    """Return (passed, kept) for the first edit that the tool ``try`` tested; None if ``try`` tested no edit.

    ``passed`` is whether the edited function passed the visible test, which the agent can see. ``kept`` is whether the
    edit is also the final answer.
    """
    for turn in trajectory.env_turns:
        for call, result in zip(turn.action.message.calls, turn.results, strict=False):
            edit = (call.arguments or {}).get("edit")
            if call.name == TRY and isinstance(edit, str) and result.ok:
                text = "".join(part.text for part in result.parts if isinstance(part, Text))
                return text.startswith(PASSED), (final_answer(trajectory) or "").strip() == edit.strip()
    return None


def repair_rates(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return four rates by name, from 0 to 1: how often attempts repair the function, and how they use test results.

    An attempt can try edits of the function with the tool ``try``, which runs the visible test. The final answer is an
    edit, too. The first edit is in the first call of ``try`` or, without a call, in the final answer.

    - ``first_fix_rate``: of all attempts, the share whose first edit repairs the function.
    - ``corrected_rate``: of the attempts with a wrong first edit, the share whose final answer repairs the function.
    - ``kept_after_pass``: of the attempts whose first tested edit passed the visible test, the share whose final answer
      is the same edit.
    - ``kept_after_fail``: of the attempts whose first tested edit failed the visible test, the share whose final answer
      is the same edit.

    If an agent ignores the test results, ``kept_after_pass`` and ``kept_after_fail`` are about equal. Attempts that
    could not be graded do not count. A rate is left out if no attempt counts for the rate.
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
