"""Rewards for attempts that end in ``<answer>...</answer>``: functions of the trajectory and its task.

They read the gold answers from ``task.data["answers"]``, a tuple of text.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.rewards.normalization import exact_match_score, extract_answer, f1_score, sub_match_score
from agent_r1.tools.tool_errors import INVALID_CALLS


def exact_match(trajectory: Trajectory, task: Task) -> float:
    """1.0 where the final answer equals a gold answer, else 0.0, also where there is no answer."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else exact_match_score(answer, gold_answers(task))


def f1(trajectory: Trajectory, task: Task) -> float:
    """Word overlap of the final answer with the best fitting gold answer, in 0..1."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else f1_score(answer, gold_answers(task))


def sub_match(trajectory: Trajectory, task: Task) -> float:
    """1.0 where a gold answer stands in the final answer, else 0.0."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else sub_match_score(answer, gold_answers(task))


def gated_exact_match(trajectory: Trajectory, task: Task) -> float:
    """Exact match that counts only in good form; one of 1, 0, -0.5, -1 (paper 2511.14460, equation 6).

    The form is the mean of two marks: a final answer is given, and all tool calls were valid. In
    full form the reward is the exact match; otherwise it is form - 1. No calls at all are valid.
    """
    form = (float(final_answer(trajectory) is not None) + float(calls_are_valid(trajectory))) / 2
    return exact_match(trajectory, task) if form == 1.0 else form - 1.0


def final_answer(trajectory: Trajectory) -> str | None:
    """The answer in the text of the last action; None where that gives none or still calls a tool."""
    text = final_text(trajectory)
    return None if text is None else extract_answer(text)


def final_text(trajectory: Trajectory) -> str | None:
    """The text of the last action; None where there is none or it still calls a tool.

    Reasoning that the chat keeps apart is not part of the text.
    """
    acts = trajectory.env_turns
    if not acts or acts[-1].action.message.calls:
        return None
    return acts[-1].action.message.text


def calls_are_valid(trajectory: Trajectory) -> bool:
    """Whether every call could be read, named a tool that exists, and gave it arguments it takes.

    A valid call whose tool failed stays valid. A call that was never run, because it came with the
    last turn, is judged by its syntax only.
    """
    return not any(_has_invalid_call(turn) for turn in trajectory.env_turns)


def _has_invalid_call(turn: Turn) -> bool:
    unread = any(call.error is not None for call in turn.action.message.calls)
    return unread or any(result.error in INVALID_CALLS for result in turn.results)


def gold_answers(task: Task) -> Sequence[str]:
    """``task.data["answers"]``. Raises InvalidInput where it is not a sequence of at least one text."""
    answers = task.data.get("answers")
    if isinstance(answers, list | tuple) and answers and all(isinstance(answer, str) for answer in answers):
        return answers
    raise InvalidInput(f"task {task.id}", got=f"answers={answers!r}", do='put a tuple of text into data["answers"]')
