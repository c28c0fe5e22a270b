"""Reward functions for attempts that end in ``<answer>...</answer>``.

The gold answers are ``task.data["answers"]``, a tuple of strings. The score is the highest score over these answers.

Before answers are compared, they are normalized as in SQuAD's evaluation script (Rajpurkar et al. 2016) and in HotpotQA
(Yang et al. 2018): lower case, no ASCII punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer equals a gold answer after normalization, otherwise 0.0."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else exact_match_score(answer, gold_answers(task))


def f1(trajectory: Trajectory, task: Task) -> float:
    """Return the highest F1 over words between the final answer and a gold answer, in [0, 1]; 0.0 without an answer."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else f1_score(answer, gold_answers(task))


def sub_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer contains a gold answer after normalization, otherwise 0.0."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else sub_match_score(answer, gold_answers(task))


def gated_exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return the exact match (1 or 0) if the format is right, else a penalty (arXiv:2511.14460, eq. 6).

    The format has two parts: the attempt gives a final answer, and no tool call was invalid. The penalty is -0.5 if one
    part is wrong, and -1 if both parts are wrong.
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

    The text has no reasoning if the parser of the model's output separated the reasoning from the text. If an agent
    program returned an answer, return this answer instead.
    """
    if trajectory.answer is not None:
        return trajectory.answer
    turns = trajectory.env_turns
    if not turns or turns[-1].action.message.calls:
        return None
    return turns[-1].action.message.text


def calls_are_valid(trajectory: Trajectory) -> bool:
    """Return whether every tool call could be parsed, was a call of a known tool, and had valid arguments.

    If a call of the last turn was not run, only its syntax is checked.
    """
    turns = trajectory.env_turns
    is_malformed = any(call.error is not None for turn in turns for call in turn.action.message.calls)
    return not is_malformed and all(result.error not in INVALID_CALL_KINDS for turn in turns for result in turn.results)


def gold_answers(task: Task) -> Sequence[str]:
    """Return ``task.data["answers"]``. Raise InvalidInput if this value is not a nonempty list or tuple of strings."""
    answers = task.data.get("answers")
    if isinstance(answers, list | tuple) and answers and all(isinstance(answer, str) for answer in answers):
        return answers
    raise InvalidInput(f"task {task.id}", got=f"answers={answers!r}", do='put a tuple of text into data["answers"]')


def extract_answer(text: str) -> str | None:
    """Return the content of the last complete ``<answer>...</answer>``; None if there is none or it is blank."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() or None if answers else None


def normalize(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, and with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match_score(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the normalized prediction equals a normalized gold answer, else 0.0."""
    return float(normalize(prediction) in map(normalize, answers))


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Return the highest F1 over words between the prediction and one of the gold ``answers``, in [0, 1].

    As in HotpotQA's script, "yes", "no" and "noanswer" have F1 0 with every other answer. Texts that are equal after
    normalization have F1 1.0, even if both are empty (as in SQuAD 2.0).

    Example:
        >>> f1_score("Walt Disney Company", ["Walt Disney"])
        0.8
    """
    best, prediction = 0.0, normalize(prediction)
    for answer in map(normalize, answers):
        if prediction == answer:
            return 1.0
        if prediction not in _CLOSED_ANSWERS and answer not in _CLOSED_ANSWERS:
            predicted, gold = prediction.split(), answer.split()
            common = (Counter(predicted) & Counter(gold)).total()
            # 2PR / (P + R), with precision P = common / |predicted| and recall R = common / |gold|
            best = max(best, 2 * common / (len(predicted) + len(gold)))
    return best


def sub_match_score(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the normalized prediction contains a normalized gold answer, else 0.0. Whole words are compared."""
    return float(any(_contains(normalize(prediction), normalize(answer)) for answer in answers))


def _contains(prediction: str, answer: str) -> bool:
    return answer == prediction if not answer else f" {answer} " in f" {prediction} "


ANSWER_REWARDS = (exact_match, f1, sub_match, gated_exact_match)
"""The reward functions that read ``task.data["answers"]``."""
