"""Whether an attempt's final answer is the gold one, and whether it keeps the form that was asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.envs.adapters.pool import Pool
from agent_r1.rewards.answers import calls_are_valid, final_text
from agent_r1.tasksets.math.answers import stated_answer
from agent_r1.tasksets.math.form import alike, refusal
from agent_r1.tasksets.math.normal import exact, normal
from agent_r1.tools.execution import Raised, Returned, TimedOut

_log = logging.getLogger(__name__)

SECONDS = 5.0
"""What comparing two answers may take. The usual one takes milliseconds."""

LONGEST = 1000
"""Characters of an answer; no benchmark has one half as long, and what is longer is wrong without being parsed."""

_VERIFIER = "agent_r1.tasksets.math.verifier"


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether an answer is right. None: that could not be found out, for ``reason``.

    Example:
        Checked(None, "score timed out")
    """

    correct: bool | None
    reason: str = ""


class AnswerChecker:
    """Compares answers in processes that are killed where they hang (:class:`Pool`); never in this one."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._pool = Pool(_VERIFIER, f"{_VERIFIER}:Verifier", seconds)

    async def check(self, gold: str, said: str, question: str) -> Checked:
        """Whether ``said`` is right. One that cannot be computed, where the gold answer can, is wrong."""
        if len(said) > LONGEST:
            return Checked(False, f"it is longer than {LONGEST} characters")
        said = normal(said)
        gold = alike(normal(gold), said)
        refused = refusal(gold, said, question)
        if refused is not None:
            return Checked(False, refused)
        checked = await self._compared(exact(gold), exact(said))
        if checked.correct is None and await self._compared(gold, gold) == Checked(True):
            return Checked(False, f"it cannot be computed: {checked.reason}")
        return checked

    async def _compared(self, gold: str, said: str) -> Checked:
        match await self._pool.call("same", gold, said):
            case Returned(value=bool() as same):
                return Checked(same)
            case TimedOut():
                return Checked(None, "score timed out")
            case Raised(reason=reason):
                return Checked(None, f"score failed: {reason}")
            case outcome:
                return Checked(None, f"score failed: {outcome}")


class MathScorer:
    """Implements core ``Scorer``. Rewards:

    - ``correct``: 1 where the final answer equals ``task.data["answer"]`` and is one (see ``form``), else 0, also
      where there is no answer; None where that could not be found out, as the gold answer cannot be computed
    - ``form``: 1 where the last action states an answer and every call was valid, else 0; whatever the answer is
    """

    def __init__(self, checker: AnswerChecker) -> None:
        self._checker = checker

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        said = [_answer_of(trajectory) for trajectory in group]
        different = [
            answer for answer in dict.fromkeys(said) if answer is not None
        ]  # a group agrees more often than not
        gold, question = task.data["answer"], task.messages[-1].text
        checks = await asyncio.gather(*(self._checker.check(gold, answer, question) for answer in different))
        checked = dict(zip(different, checks, strict=True))
        for check in checks:
            if check.correct is None:
                _log.warning("an answer to %s could not be scored: %s", task.id, check.reason)
        return tuple(_rewards(trajectory, answer, checked) for trajectory, answer in zip(group, said, strict=True))


def _answer_of(trajectory: Trajectory) -> str | None:
    text = final_text(trajectory)
    return None if text is None else stated_answer(text)


def _rewards(trajectory: Trajectory, answer: str | None, checked: dict[str, Checked]) -> Rewards:
    if answer is None:
        return {"correct": 0.0, "form": 0.0}
    correct = checked[answer].correct
    return {"correct": None if correct is None else float(correct), "form": float(calls_are_valid(trajectory))}
