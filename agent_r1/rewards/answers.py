"""Reward functions for attempts that end in ``<answer>...</answer>``.

The functions read the gold answers from ``task.data["answers"]``, a tuple of strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.rewards.normalization import exact_match_score, extract_answer, f1_score, sub_match_score
from agent_r1.tools import INVALID_CALL_KINDS


def exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer equals a gold answer after normalization; 0.0 if not, or if there is no answer."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else exact_match_score(answer, gold_answers(task))


def f1(trajectory: Trajectory, task: Task) -> float:
    """Return the F1 over words between the final answer and a gold answer, in [0, 1].

    If there are several gold answers, return the highest F1. Return 0.0 if there is no final answer.
    """
    answer = final_answer(trajectory)
    return 0.0 if answer is None else f1_score(answer, gold_answers(task))


def sub_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer contains a gold answer after normalization.

    Return 0.0 if the final answer contains no gold answer, or if there is no final answer.
    """
    answer = final_answer(trajectory)
    return 0.0 if answer is None else sub_match_score(answer, gold_answers(task))


def gated_exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return the exact match (1 or 0) if the format is right, else a penalty of -0.5 or -1 (2511.14460, equation 6).

    The format has two parts: the attempt gives a final answer, and no tool call was invalid. If both parts are right,
    the format is right. If one part is right, the penalty is -0.5. If both parts are wrong, the penalty is -1.
    """
    format_score = (float(final_answer(trajectory) is not None) + float(calls_are_valid(trajectory))) / 2
    return exact_match(trajectory, task) if format_score == 1.0 else format_score - 1.0


def final_answer(trajectory: Trajectory) -> str | None:
    """Return the answer in the text of the last action; None if the last action gives no answer or calls a tool.

    If an agent program returned a text, return the answer in this text instead. If this text has no ``<answer>`` tags,
    return the whole text.
    """
    text = final_text(trajectory)
    if text is None:
        return None
    whole_text = None if trajectory.answer is None else text.strip() or None
    return extract_answer(text) or whole_text


def final_text(trajectory: Trajectory) -> str | None:
    """Return the text of the last action; None if there is no action or the last action calls a tool.

    Reasoning that the renderer separates is not part of the text. If an agent program returned an answer, return this
    answer instead.
    """
    if trajectory.answer is not None:
        return trajectory.answer
    turns = trajectory.env_turns
    if not turns or turns[-1].action.message.calls:
        return None
    return turns[-1].action.message.text


def calls_are_valid(trajectory: Trajectory) -> bool:
    """Return whether every call could be parsed, named a known tool, and gave the tool valid arguments.

    A valid call stays valid if its tool fails. If a call of the last turn was not run, only its syntax is checked.
    """
    return not any(_has_invalid_call(turn) for turn in trajectory.env_turns)


def _has_invalid_call(turn: Turn) -> bool:
    is_malformed = any(call.error is not None for call in turn.action.message.calls)
    return is_malformed or any(result.error in INVALID_CALL_KINDS for result in turn.results)


def gold_answers(task: Task) -> Sequence[str]:
    """Return ``task.data["answers"]``.

    Raises InvalidInput if ``task.data["answers"]`` is not a list or tuple of at least one string.
    """
    answers = task.data.get("answers")
    if isinstance(answers, list | tuple) and answers and all(isinstance(answer, str) for answer in answers):
        return answers
    raise InvalidInput(f"task {task.id}", got=f"answers={answers!r}", do='put a tuple of text into data["answers"]')


ANSWER_REWARDS = (exact_match, f1, sub_match, gated_exact_match)
"""The reward functions that read ``task.data["answers"]``."""
