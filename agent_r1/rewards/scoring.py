"""Reward functions, and the scorer that runs them. If a function fails, its reward is ``Unscored`` and not 0.0."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from statistics import fmean
from typing import Any, assert_never

import regex

from agent_r1.core.environment import ExecutesCode, weakest_sandbox
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.text import fold
from agent_r1.core.trajectory import RewardValue, Scorer, Scores, Trajectory, Unscored
from agent_r1.sandbox.sandbox import sandbox_level
from agent_r1.tools.execution import DEFAULT_TIMEOUT, CallFailure, CallTimeout, ReturnValue, run_with_timeout
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Applied before and after Unicode is normalized, which makes "TM" of the trademark, and a fraction slash of a half.
_PLAIN = str.maketrans(
    dict.fromkeys("™®©℠", "")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u2033", '"')
    | {"、": ",", "。": ".", "\u2044": "/", "≤": "<=", "≥": ">=", "≠": "!="}
    | {fraction: f" {fraction}" for fraction in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
_EXPONENT = regex.compile(r"(?<=\d)(?=[⁰¹²³⁴-⁻])")
_QUOTED = regex.compile(r"""(?<!\w)(["'`*_]{1,3})(?=\S)(.{1,300}?)\1(?!\w)""")
_ONE_FORM = (
    (r"""(?<=\d),(?=\d{3}(?!\d))|(?<=\d)'(?=s\b)|(?<='\d\d?)\"""", ""),  # 1,000 and 1990's and 5'11"
    (r"(?<=\d),(?=\d)", " "),
    (r"(?<=\d) ?(?:%|per ?cent\b)", "%"),
    (r"(?<=\d) - (?=\d)|^- (?=[^\w\s]*\d)", "-"),
    (r"(?<![\w.])\.(?=\d)", "0."),
    (r"(?<!\w)-(\p{Sc})", r"\1-"),
    (r"[<>=]+|!=", r" \g<0> "),
)
_VISIBLE = regex.compile(r"[^\p{P}$]")
_EXACT = regex.compile(r"\d|^\P{L}*$")
_LOST = regex.compile(r"(^-|(?<=\w)[+#]+|(?<=^\p{L})\*|(?<=^\p{L}{1,2})-(?![\w-]))|[\p{P}$+^`|~]")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})

Normalization = Callable[[str], str]
"""A rule that gives equal answers the same text: :func:`normalize`, or :func:`benchmark_normalize`."""


def score_answer(
    score: Callable[[str, Sequence[str], Normalization], float], rule: Normalization, trajectory: Trajectory, task: Task
) -> float:
    """Return ``score(answer, gold answers, rule)`` for the final answer; 0.0 without an answer."""
    answer = final_answer(trajectory)
    return 0.0 if answer is None else score(answer, gold_answers(task), rule)


def exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer equals a gold answer after normalization, otherwise 0.0."""
    return score_answer(exact_match_score, normalize, trajectory, task)


def f1(trajectory: Trajectory, task: Task) -> float:
    """Return the highest F1 over words between the final answer and a gold answer, in [0, 1]; 0.0 without an answer."""
    return score_answer(f1_score, normalize, trajectory, task)


def sub_match(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the final answer contains a gold answer after normalization, otherwise 0.0."""
    return score_answer(sub_match_score, normalize, trajectory, task)


def gated_exact_match(trajectory: Trajectory, task: Task) -> float:
    """Return the exact match (1 or 0) if the format is right, else a penalty (arXiv:2511.14460, eq. 6).

    The penalty is -0.5 if there is no final answer, and -0.5 if a tool call was invalid.
    """
    format_score = (float(final_answer(trajectory) is not None) + float(calls_are_valid(trajectory))) / 2
    return exact_match(trajectory, task) if format_score == 1.0 else format_score - 1.0


def final_answer(trajectory: Trajectory) -> str | None:
    """Return the answer in :func:`final_text`, or None. Of a text of an agent program, the tags can be left out."""
    return extract_answer(final_text(trajectory) or "") or (trajectory.answer or "").strip() or None


def final_text(trajectory: Trajectory) -> str | None:
    """Return the answer of an agent program, or the text of the last action; None if the last action calls a tool."""
    if trajectory.answer is not None:
        return trajectory.answer
    turns = trajectory.env_turns
    if not turns or turns[-1].action.message.calls:
        return None
    return turns[-1].action.message.text


def calls_are_valid(trajectory: Trajectory) -> bool:
    """Return whether every tool call could be parsed, was a call of a known tool, and had valid arguments."""
    turns = trajectory.env_turns
    is_malformed = any(call.error is not None for turn in turns for call in turn.action.message.calls)
    return not is_malformed and all(result.error not in INVALID_CALL_KINDS for turn in turns for result in turn.results)


def gold_answers(task: Task) -> Sequence[str]:
    """Return ``task.data["answers"]``. Raise InvalidInput if it is not a nonempty list or tuple of strings."""
    answers = task.data.get("answers")
    if isinstance(answers, list | tuple) and answers and all(isinstance(answer, str) for answer in answers):
        return answers
    raise InvalidInput(f"task {task.id}", got=f"answers={answers!r}", do='put a tuple of text into data["answers"]')


def extract_answer(text: str) -> str | None:
    """Return the content of the last complete ``<answer>...</answer>``; None if there is none or it is blank."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() or None if answers else None


def normalize(text: str) -> str:
    """Return the text in lower case and in one form of Unicode, without articles, with single spaces.

    Words lose their punctuation, except "+" and "#" as in "C++", and signs of a single letter as in "A-". Numbers and
    formulas keep it, except around them. An "a" is an article at the start alone. If nothing is left, all stays.

    Example:
        >>> normalize("The “Louvre”, Paris"), normalize("(-1.50 %)."), normalize("C++!"), normalize("!!!")
        ('louvre paris', '-1.50%', 'c++', '!!!')
    """
    plain = " ".join(fold(_EXPONENT.sub("^", text.translate(_PLAIN))).translate(_PLAIN).split())
    plain = _QUOTED.sub(r"\2", _QUOTED.sub(r"\2", plain))
    for pattern, written in _ONE_FORM:
        plain = regex.sub(pattern, written, plain)
    opened = (token.lstrip("\"'([{*_`$¿¡") for token in plain.split())
    tokens = [token for token in opened if _VISIBLE.search(token)]
    words = [
        token.rstrip(")]}$.,;:!?") if _EXACT.search(token) else _LOST.sub(r"\1", token)
        for index, token in enumerate(tokens)
        if token not in (("an", "the") if index else ("a", "an", "the")) or index == len(tokens) - 1
    ]
    return " ".join(words or fold(text).split())


def benchmark_normalize(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, and with single spaces.

    This is the rule of SQuAD's and HotpotQA's scripts. It deletes meaning: "-1.5" becomes "15", and "A" becomes "".
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match_score(prediction: str, answers: Sequence[str], rule: Normalization = normalize) -> float:
    return float(rule(prediction) in map(rule, answers))


def f1_score(prediction: str, answers: Sequence[str], rule: Normalization = normalize) -> float:
    """Return the highest F1 over words between the prediction and one of the gold ``answers``, in [0, 1].

    Texts that are equal after normalization have F1 1.0, even if both are empty (as in SQuAD 2.0).

    Example:
        >>> f1_score("Walt Disney Company", ["Walt Disney"])
        0.8
    """
    best, prediction = 0.0, rule(prediction)
    for answer in map(rule, answers):
        if prediction == answer:
            return 1.0
        # as in HotpotQA's script, "yes", "no" and "noanswer" have F1 0 with every other answer
        if prediction not in _CLOSED_ANSWERS and answer not in _CLOSED_ANSWERS:
            predicted, gold = prediction.split(), answer.split()
            common = (Counter(predicted) & Counter(gold)).total()
            # 2PR / (P + R), with precision P = common / |predicted| and recall R = common / |gold|
            best = max(best, 2 * common / (len(predicted) + len(gold)))
    return best


def sub_match_score(prediction: str, answers: Sequence[str], rule: Normalization = normalize) -> float:
    """Return 1.0 if the normalized prediction contains the words of a normalized gold answer, else 0.0."""
    prediction = rule(prediction)
    return float(any(f" {answer} " in f" {prediction} " if answer else not prediction for answer in map(rule, answers)))


RewardFunction = Callable[[Trajectory, Task], Any]
"""A sync or async function (trajectory, task) -> a reward, or a mapping from names to rewards. A reward is a number, or
a tuple with one number per turn."""

ANSWER_REWARDS = (exact_match, f1, sub_match, gated_exact_match)
"""The reward functions that read ``task.data["answers"]``."""

BENCHMARK_REWARDS: Mapping[str, RewardFunction] = {
    "em": partial(score_answer, exact_match_score, benchmark_normalize),
    "f1": partial(score_answer, f1_score, benchmark_normalize),
    "sub_match": partial(score_answer, sub_match_score, benchmark_normalize),
}
"""The scores that are reported for question answering benchmarks, by the rule of their scripts."""

# Parameters of reward functions of other frameworks, which are called with lists of texts or with one text.
_FOREIGN_PARAMETERS = {
    *("completions", "completion", "prompts", "prompt", "data_source", "solution_str", "response", "responses"),
    *("output", "outputs", "solution", "ground_truth", "answer", "target", "state", "info"),
}


@dataclass(frozen=True, slots=True)
class FunctionScorer:
    """A scorer that applies reward functions to each trajectory.

    A reward is Unscored if its function raises, takes longer than ``timeout`` seconds, or returns a value that is not a
    finite number. A function that runs code written by the policy must have an attribute ``sandbox``
    (:class:`~agent_r1.core.environment.ExecutesCode`).
    """

    functions: Mapping[str, RewardFunction]  # by the name of the reward, if a function returns no names
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        for name, function in self.functions.items():
            try:
                signature = inspect.signature(function)
            except ValueError:  # a builtin without a signature
                continue
            except TypeError as error:
                raise InvalidInput(f"reward {name}", got=repr(function), do="give a function") from error
            if _is_foreign(signature):
                do = "write def f(trajectory, task), called for one attempt: final_answer(trajectory), task.data[..]"
                raise InvalidInput(f"reward {name}", got=f"a function with the parameters {signature}", do=do)

    @property
    def sandbox(self) -> str | None:
        """The weakest sandbox in which a reward runs code of the policy; None if no reward runs such code."""
        functions: Iterable[object] = self.functions.values()
        return weakest_sandbox(
            sandbox_level(function.sandbox) for function in functions if isinstance(function, ExecutesCode)
        )

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return tuple(await asyncio.gather(*(self._rewards(trajectory, task) for trajectory in group)))

    async def _rewards(self, trajectory: Trajectory, task: Task) -> Scores:
        calls = (partial(function, trajectory, task) for function in self.functions.values())
        outcomes = await asyncio.gather(*(run_with_timeout(call, self.timeout) for call in calls))
        scores: dict[str, RewardValue | Unscored] = {}
        for name, outcome in zip(self.functions, outcomes, strict=True):
            match outcome:
                case ReturnValue(value=Mapping() as values):
                    named: Mapping[str, object] = {str(key): value for key, value in values.items()}
                case ReturnValue(value=value):
                    named = {name: value}
                case CallFailure(reason=reason, location=location):
                    named = {name: Unscored(reason + location)}
                case CallTimeout(seconds=seconds):
                    named = {name: Unscored(f"it took longer than {seconds:g} seconds")}
                case _:
                    assert_never(outcome)
            for key, value in named.items():
                scores[key] = Unscored("two functions return it") if key in scores else _score(value)
        return scores


def _is_foreign(signature: inspect.Signature) -> bool:
    positional = (name for name, p in signature.parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD)
    first, second = (*positional, "", "")[:2]
    try:
        signature.bind("trajectory", "task")
    except TypeError:
        return True
    return first == "task" or second == "trajectory" or not _FOREIGN_PARAMETERS.isdisjoint((first, second))


def functions_by_name(functions: Iterable[RewardFunction]) -> Mapping[str, RewardFunction]:
    """Return the functions by their names, such as ``{"exact_match": exact_match}``.

    Raise InvalidInput if two functions have the same name, or if an element is a lambda or no function.
    """
    by_name: dict[str, RewardFunction] = {}
    for function in functions:
        if not inspect.isroutine(function) or function.__name__ == "<lambda>":
            do = "give a function defined with def: its name is the reward's"
            raise InvalidInput("reward", got=repr(function), do=do)
        if function.__name__ in by_name:
            got = f"two functions named {function.__name__!r}"
            raise InvalidInput("rewards", got=got, do="give each its own name")
        by_name[function.__name__] = function
    return by_name


def _score(value: object) -> float | tuple[float, ...] | Unscored:
    scores: list[float] = []
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, Unscored):
            return item
        if not isinstance(item, Real):
            return Unscored(f"it is {type(item).__name__} and not a number")
        try:
            score = float(item)
        except (OverflowError, ValueError) as error:
            return Unscored(str(error))
        if not math.isfinite(score):
            return Unscored(f"it is {score}")
        scores.append(score)
    return tuple(scores) if isinstance(value, tuple) else scores[0]


@dataclass(frozen=True, slots=True)
class ShuffledScorer:
    """A scorer that shuffles the rewards of ``scorer`` among the attempts at a task.

    A policy can learn nothing from shuffled rewards. The mean and the spread of the rewards in a group stay the same. A
    reward with one number per turn first becomes the sum of its numbers.
    """

    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        scores = await self.scorer.score(group, task)
        order = list(range(len(scores)))
        if group:  # the order depends on the group alone, so several shuffled scorers agree
            random.Random(f"{group[0].attempt.sort_key} {task.id}").shuffle(order)
        return tuple(
            {name: sum(value) if isinstance(value, tuple) else value for name, value in scores[index].items()}
            for index in order
        )


@dataclass(frozen=True, slots=True)
class EnvScorer:
    """A scorer for the tasks of one of several environments. Attempts at other tasks get no reward from it."""

    env: str
    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return await self.scorer.score(group, task) if task.env == self.env else ({},) * len(group)


def calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls in the attempt."""
    return float(sum(len(turn.action.message.calls) for turn in trajectory.env_turns))


def repeated_calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls that repeat an earlier call of the attempt: same tool, same arguments."""
    made = [
        (call.name, call.raw if call.arguments is None else json.dumps(call.arguments, sort_keys=True, default=str))
        for turn in trajectory.env_turns
        for call in turn.action.message.calls
    ]
    return float(len(made) - len(set(made)))


def failed_calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls that failed, because of an error of the agent or of the tool."""
    return float(sum(not result.ok for turn in trajectory.env_turns for result in turn.results))


def tokens(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tokens that the policy sampled in the attempt."""
    return float(sum(len(turn.action_ids) for turn in trajectory.turns))


def logprob(trajectory: Trajectory, task: Task) -> float:
    """Return the mean log-probability with which the policy sampled its tokens, or 0.0 if there is no token."""
    values = [value for turn in trajectory.turns for value in turn.logprobs]
    return fmean(values) if values else 0.0


def format(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the attempt gives a final answer and no tool call is invalid; otherwise 0.0."""
    return float(final_answer(trajectory) is not None and calls_are_valid(trajectory))


def grounded(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the normalized final answer occurs in the result of a tool call of the attempt, otherwise 0.0."""
    answer = normalize(final_answer(trajectory) or "")
    results = (result for turn in trajectory.env_turns for result in turn.results)
    texts = (normalize(" ".join(part.text for part in result.parts if isinstance(part, Text))) for result in results)
    return float(bool(answer) and any(f" {answer} " in f" {text} " for text in texts))


TERMS: Mapping[str, RewardFunction] = {
    function.__name__: function for function in (calls, repeated_calls, failed_calls, tokens, logprob, format, grounded)
}
"""The rewards of this module by name, for the option ``--extra_rewards.NAME``."""
