"""Whether an attempt's solution passes its exam, whether its first one did, and whether it keeps the form."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.env.rewards import calls_are_valid, final_text
from agent_r1.env.sandbox import Sandbox, Verdict
from agent_r1.tasks.code.exam import Exam
from agent_r1.tasks.code.tool import RUN_TESTS

_log = logging.getLogger(__name__)

_BLOCK = re.compile(r"^```python[ \t]*\n(?P<code>.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class CodeScorer:
    """Implements core ``Scorer``. Rewards:

    - ``passed``: 1 where the final solution passes the exam, else 0, also where there is none; None where it could
      not be judged, which is never the solution's fault
    - ``form``: 1 where the last action holds a solution and every call was valid, else 0; whatever the solution is
    - ``first_passed``: as ``passed``, of the first code that was given to ``run_tests``, or as the final solution
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

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


def solution_in(text: str) -> str | None:
    """What is in the last whole ```` ```python ```` block of a text; None where there is none or it is blank.

    Strict: the fences stand on lines of their own, and a block that was cut off is none.
    """
    blocks: list[str] = _BLOCK.findall(text)
    return blocks[-1] if blocks and blocks[-1].strip() else None


def final_code(trajectory: Trajectory) -> str | None:
    """The solution in the last action; None where that holds none or still calls a tool."""
    text = final_text(trajectory)
    return None if text is None else solution_in(text)


def first_code(trajectory: Trajectory) -> str | None:
    """The first code that was run by ``run_tests``; without any, the final solution."""
    tried = (code for turn in trajectory.turns for code in _tried(turn))
    return next(tried, final_code(trajectory))


def repairs(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """How often the first code was right (``first_pass_rate``), and how often it was mended where it was not.

    ``fix_rate`` is the share of the attempts whose first code failed that passed in the end; it is left out where
    no first code failed. Attempts that could not be judged are not looked at.
    """
    judged = [t.rewards for t in trajectories if None not in (_of(t, "passed"), _of(t, "first_passed"))]
    failed = [rewards for rewards in judged if rewards["first_passed"] == 0]
    rates = {"first_pass_rate": (len(judged) - len(failed)) / len(judged)} if judged else {}
    return rates | ({"fix_rate": sum(rewards["passed"] == 1 for rewards in failed) / len(failed)} if failed else {})


def _of(trajectory: Trajectory, name: str) -> Any:
    return trajectory.rewards.get(name)


def _tried(turn: Turn) -> list[str]:
    calls = zip(turn.action.message.calls, turn.results, strict=False)  # those of the last turn are not run
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
