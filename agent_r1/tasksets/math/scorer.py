"""The scorer of mathematics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.envs.adapters.pool import WorkerPool
from agent_r1.rewards.answers import calls_are_valid, final_text
from agent_r1.tasksets.math.answers import stated_answer
from agent_r1.tools.execution import CallFailure, CallTimeout, ReturnValue

_log = logging.getLogger(__name__)

SECONDS = 5.0
"""The time limit for one comparison, in seconds. A comparison usually takes milliseconds."""

LONGEST = 1000
"""The maximum number of characters of an answer. A longer answer is wrong. Gold answers have less than half this
length."""

_VERIFIER = "agent_r1.tasksets.math.verifier"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a comparison with the gold answer.

    Attributes:
        correct: whether the agent's answer is right; None if the answers could not be compared.
        reason: why the form was refused or the comparison failed; otherwise "".

    Example:
        Checked(None, "score timed out")
    """

    correct: bool | None
    reason: str = ""


class AnswerChecker:
    """A checker that compares answers in separate processes, which are killed at the time limit."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._pool = WorkerPool(_VERIFIER, f"{_VERIFIER}:Verifier", seconds)

    async def check(self, gold: str, said: str, question: str) -> Checked:
        """Compare the answer ``said`` with the gold answer.

        If the comparison raises an error or takes too long, the program tests whether math-verify can compute the gold
        answer. If so, the answer ``said`` counts as wrong (``correct`` is False). Otherwise, ``correct`` is None.
        """
        if len(said) > LONGEST:
            return Checked(False, f"it is longer than {LONGEST} characters")
        match await self._pool.call("check", gold, said, question):
            case ReturnValue(value=[bool() as correct, str() as reason]):
                return Checked(correct, reason)
            case CallTimeout():
                reason = "score timed out"
            case CallFailure(reason=failure):
                reason = f"score failed: {failure}"
            case outcome:
                reason = f"score failed: {outcome}"
        if await self._pool.call("is_computable", gold, said) == ReturnValue(True):
            return Checked(False, f"it cannot be computed: {reason}")
        return Checked(None, reason)


class MathScorer:
    """A scorer with two rewards.

    - ``correct``: 1 if the final answer equals ``task.data["answer"]`` and has an acceptable form (see the module
      ``form``); else 0. None if math-verify cannot compute the gold answer.
    - ``form``: 1 if the last action states an answer, right or wrong, and every call was valid; else 0.
    """

    def __init__(self, checker: AnswerChecker) -> None:
        self._checker = checker

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        said = await run_in_thread(lambda: [_answer_of(trajectory) for trajectory in group])
        different = [
            answer for answer in dict.fromkeys(said) if answer is not None
        ]  # equal answers are checked only once
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
