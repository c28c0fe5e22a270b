"""Whether an attempt's solution passes its exam, whether its first one did, and whether it keeps the form."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any

from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.rewards.answers import calls_are_valid, final_text
from agent_r1.sandbox import Sandbox, Verdict
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.tool import RUN_TESTS

_log = logging.getLogger(__name__)

_OPENER = re.compile(r"^(?P<before>[ \t]*|.*</think>[ \t]*)```(?i:python3?|py)[ \t]*\n", re.MULTILINE)
_CLOSER = re.compile(r"^[ \t]*```(?![`\w])", re.MULTILINE)


class CodeScorer:
    """Implements core ``Scorer``. Rewards:

    - ``passed``: 1 where the final solution passes the exam, else 0, also where there is none; None where it could
      not be judged, which is never the solution's fault
    - ``form``: 1 where the last action holds a solution and every call was valid, else 0; whatever the solution is
    - ``first_passed``: as ``passed``, of the first code that was given to ``run_tests``, or as the final solution
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.sandbox = sandbox.in_force

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

    ``py``, ``Python`` and ``python3`` are Python too, and a block may be indented, as in a list. Strict: the fences
    begin lines of their own, and a block that was cut off is none.
    """
    text = text.replace("\r\n", "\n")
    blocks = [block for opener in _OPENER.finditer(text) if (block := _closed(text, opener.end())) is not None]
    return dedent(blocks[-1]) if blocks and blocks[-1].strip() else None


def _closed(text: str, start: int) -> str | None:
    """The block from ``start``; None where it is cut off, by the end of the text or by the next opener."""
    closer, opener = _CLOSER.search(text, start), _OPENER.search(text, start)
    if closer is None or (opener is not None and opener.start() < closer.start()):
        return None
    return text[start : closer.start()]


def final_code(trajectory: Trajectory) -> str | None:
    """The solution in the last action; None where that holds none or still calls a tool."""
    text = final_text(trajectory)
    return None if text is None else solution_in(text)


def first_code(trajectory: Trajectory) -> str | None:
    """The first code that was run by ``run_tests``; without any, the final solution."""
    return next(iter(codes_of(trajectory)), None)


def codes_of(trajectory: Trajectory) -> tuple[str, ...]:
    """Every code that was run by ``run_tests``, and the final solution."""
    tried = tuple(code for turn in trajectory.turns for code in _tried(turn))
    final = final_code(trajectory)
    return tried if final is None else (*tried, final)


def repairs(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """How often the first code was right (``first_pass_rate``), and how often it was mended where it was not.

    ``fix_rate`` is the share that passed in the end of the attempts whose first code failed and that gave a second;
    ``no_second_try_rate`` is the share of those whose first code failed that did not. Both are left out where there
    are no such attempts. Those that could not be judged are not looked at.
    """
    judged = [t for t in trajectories if None not in (_of(t, "passed"), _of(t, "first_passed"))]
    failed = [t for t in judged if _of(t, "first_passed") == 0]
    again = [t for t in failed if len(codes_of(t)) > 1]
    rates = {"first_pass_rate": (len(judged) - len(failed)) / len(judged)} if judged else {}
    rates |= {"no_second_try_rate": (len(failed) - len(again)) / len(failed)} if failed else {}
    return rates | ({"fix_rate": sum(_of(t, "passed") == 1 for t in again) / len(again)} if again else {})


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
