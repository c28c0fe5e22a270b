"""The scorer of mathematical problems. It compares the agent's answer with the gold answer (the right answer)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.envs.processes import ProcessPool
from agent_r1.rewards.scoring import calls_are_valid, final_text
from agent_r1.tasksets.math.problems import stated_answer
from agent_r1.tools.execution import CallFailure, CallTimeout, ReturnValue

_log = logging.getLogger(__name__)

SECONDS = 5.0
"""The time limit for one comparison, which usually takes milliseconds."""

LONGEST = 1000
"""The maximum number of characters of an agent's answer; a longer one is wrong. In GSM8K and MATH, all right answers
have fewer than 500."""

_VERIFIER = "agent_r1.tasksets.math.verifier"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check. ``correct`` is None if the check failed. ``reason`` says why values were not compared."""

    correct: bool | None
    reason: str = ""


class AnswerChecker:
    """A checker that compares answers in separate processes. A comparison of more than ``seconds`` is killed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._pool = ProcessPool(_VERIFIER, f"{_VERIFIER}:Verifier", seconds)

    async def check(self, gold: str, said: str, question: str) -> Checked:
        """Compare the agent's answer ``said`` with the right answer ``gold``; ``question`` is the problem's text."""
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
        # Which answer is the cause? If math-verify can compare the right answer with itself, the agent's answer is.
        if await self._pool.call("is_computable", gold, said) == ReturnValue(True):
            return Checked(False, f"it cannot be computed: {reason}")
        return Checked(None, reason)


class MathScorer:
    """A scorer with two rewards.

    - ``correct``: 1 if the final answer equals the right answer ``task.data["answer"]`` and has an acceptable form
      ("2 + 3" for "5" has not); else 0. None if the right answer is the cause of a failed comparison.
    - ``form``: 1 if the last action states an answer, right or wrong, and every tool call was valid; else 0.
    """

    def __init__(self, checker: AnswerChecker) -> None:
        self._checker = checker

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        said = await run_in_thread(lambda: [stated_answer(final_text(each) or "") for each in group])
        different = [answer for answer in dict.fromkeys(said) if answer is not None]  # equal answers: checked once
        gold, question = task.data["answer"], task.messages[-1].text
        checks = await asyncio.gather(*(self._checker.check(gold, answer, question) for answer in different))
        checked = dict(zip(different, checks, strict=True))
        for check in checks:
            if check.correct is None:
                _log.warning("an answer to %s could not be scored: %s", task.id, check.reason)
        return tuple(_rewards(trajectory, answer, checked) for trajectory, answer in zip(group, said, strict=True))


def _rewards(trajectory: Trajectory, answer: str | None, checked: dict[str, Checked]) -> Rewards:
    if answer is None:
        return {"correct": 0.0, "form": 0.0}
    correct = checked[answer].correct
    return {"correct": None if correct is None else float(correct), "form": float(calls_are_valid(trajectory))}
