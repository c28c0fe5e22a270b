"""The scorer of the task set ``code``."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any

from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.rewards.scoring import calls_are_valid, final_text
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.tool import RUN_TESTS

_log = logging.getLogger(__name__)

_OPENER = re.compile(r"^(?P<before>[ \t]*|.*</think>[ \t]*)```(?i:python3?|py)[ \t]*\n", re.MULTILINE)
_CLOSER = re.compile(r"^[ \t]*```(?![`\w])", re.MULTILINE)


class CodeScorer:
    """A scorer with three rewards.

    - ``passed``: 1 if the final solution passes the hidden tests; 0 if it fails or is missing; None if it could not be
      graded.
    - ``form``: 1 if the last action contains a solution, right or wrong, and every call was valid; else 0.
    - ``first_passed``: like ``passed``, for the first code that was given to ``run_tests``. Without such code, the
      value of ``passed``.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.sandbox = sandbox.isolation

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        exam: Exam = task.data["exam"]
        codes = {code for trajectory in group for code in (first_code(trajectory), final_code(trajectory))}
        different = sorted(code for code in codes if code is not None)
        verdicts = await asyncio.gather(*(exam.judge(self._sandbox, code) for code in different))
        judged = dict(zip(different, verdicts, strict=True))
        for verdict in verdicts:
            if verdict.passed is None:
                _log.warning("a solution of %s could not be judged: %s", task.id, verdict.reason)
        return tuple(_rewards(trajectory, judged) for trajectory in group)


def extract_solution(text: str) -> str | None:
    """Return the content of the last complete ```` ```python ```` block; None if the block is missing or blank.

    ``py``, ``Python`` and ``python3`` also mark Python blocks. Each fence must begin a line, and can be indented.
    """
    text = text.replace("\r\n", "\n")
    blocks = [block for opener in _OPENER.finditer(text) if (block := _closed(text, opener.end())) is not None]
    return dedent(blocks[-1]) if blocks and blocks[-1].strip() else None


def _closed(text: str, start: int) -> str | None:
    closer, opener = _CLOSER.search(text, start), _OPENER.search(text, start)
    if closer is None or (opener is not None and opener.start() < closer.start()):
        return None
    return text[start : closer.start()]


def final_code(trajectory: Trajectory) -> str | None:
    """Return the solution in the last action; None if the last action has no solution or calls a tool."""
    text = final_text(trajectory)
    return None if text is None else extract_solution(text)


def first_code(trajectory: Trajectory) -> str | None:
    """Return the first code of the attempt; None if there is no code.

    The first code is in the first call of ``run_tests`` or, if there is no call, in the final solution.
    """
    return next(iter(submitted_codes(trajectory)), None)


def submitted_codes(trajectory: Trajectory) -> tuple[str, ...]:
    """Return every code that was given to ``run_tests``, and then the final solution, if there is one.

    The code of a call that was not run is left out.
    """
    tried = tuple(code for turn in trajectory.turns for code in _tried(turn))
    final = final_code(trajectory)
    return tried if final is None else (*tried, final)


def repair_rates(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return how often the first code of an attempt passed, and how often failed code was repaired.

    - ``first_pass_rate``: of all attempts, the share whose first code passed.
    - ``no_second_try_rate``: of the attempts whose first code failed, the share without a second code.
    - ``fix_rate``: of the attempts with a second code after a failed first code, the share whose final solution passed.

    Attempts that could not be graded are ignored. A rate is left out if there are no attempts from which to compute the
    rate.
    """
    judged = [t for t in trajectories if None not in (_of(t, "passed"), _of(t, "first_passed"))]
    failed = [t for t in judged if _of(t, "first_passed") == 0]
    again = [t for t in failed if len(submitted_codes(t)) > 1]
    rates = {"first_pass_rate": (len(judged) - len(failed)) / len(judged)} if judged else {}
    rates |= {"no_second_try_rate": (len(failed) - len(again)) / len(failed)} if failed else {}
    return rates | ({"fix_rate": sum(_of(t, "passed") == 1 for t in again) / len(again)} if again else {})


def _of(trajectory: Trajectory, name: str) -> Any:
    return trajectory.rewards.get(name)


def _tried(turn: Turn) -> list[str]:
    calls = zip(turn.action.message.calls, turn.results, strict=False)  # calls of the last turn are not run
    given = [(call.arguments or {}).get("code") for call, _ in calls if call.name == RUN_TESTS]
    return [code for code in given if isinstance(code, str)]


def _rewards(trajectory: Trajectory, judged: Mapping[str, Verdict]) -> Rewards:
    first, final = first_code(trajectory), final_code(trajectory)
    return {
        "passed": _mark(final, judged),
        "form": float(final is not None and calls_are_valid(trajectory)),
        "first_passed": _mark(first, judged),
    }


def _mark(code: str | None, judged: Mapping[str, Verdict]) -> float | None:
    if code is None:
        return 0.0
    passed = judged[code].passed
    return None if passed is None else float(passed)
