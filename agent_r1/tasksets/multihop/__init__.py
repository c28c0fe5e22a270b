"""Multi-hop questions over a corpus of passages: HotpotQA, 2WikiMultihopQA, MuSiQue, and mixtures of data sets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.retrieval.client import build_index, open_retriever
from agent_r1.retrieval.config import IndexConfig
from agent_r1.retrieval.retriever import TOP_K, Passage, RetrievalError, Retriever, search_tool, unique
from agent_r1.rewards.scoring import (
    BENCHMARK_REWARDS,
    FunctionScorer,
    benchmark_normalize,
    exact_match_score,
    gated_exact_match,
    normalize,
)
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.files import Splits, all_questions, read_splits, tasks_function, whole_split
from agent_r1.tasksets.multihop.mixture import read_mixture
from agent_r1.tasksets.multihop.questions import Question, read_questions

_log = logging.getLogger(__name__)

MAX_TURNS = 5
MAX_OUTPUT = 4000
"""The maximum number of characters of a search result: five passages of the usual Wikipedia length.

The paper arXiv 2511.14460 uses 2048 characters, which cuts off the last passages.
"""

AGENT_SYSTEM = (
    "Answer the question. Look facts up with the search tool, one at a time and as often as you need. "
    "When you know the answer, give it in as few words as possible between <answer> and </answer>."
)
RAG_SYSTEM = (
    "Answer the question at the end with the help of the passages before it. "
    "Give the answer in as few words as possible between <answer> and </answer>."
)


def build(name: str, data: Path, seed: int, corpus: str | Path | None = None, encoder: str = "") -> TaskSet:
    """Build the task set ``name``: a benchmark such as "hotpotqa", or "multihop" for a mixture of data sets.

    ``data`` is a file of questions or, for a mixture, a TOML file (see the module ``mixture``). The agent searches the
    passages in ``corpus``. If ``corpus`` is None, the agent searches the passages in the files of questions.

    Raises InvalidInput if a file is missing or malformed, or if there are no passages to search.
    """
    if data.suffix == ".toml":
        splits, evaluation = read_mixture(data, seed)
    else:
        splits, evaluation = read_splits(data, seed, read_questions), ("test",)
    if corpus is None:
        retriever = build_index(IndexConfig(encoder=encoder), _own_passages(name, splits))
    else:
        retriever = open_retriever(corpus, encoder)
    search = search_tool(retriever)
    return TaskSet(
        name=name,
        env=ToolEnv([search], max_turns=MAX_TURNS, system=AGENT_SYSTEM, max_output=MAX_OUTPUT),
        tasks=tasks_function(splits, data),
        scorers=(FunctionScorer({**BENCHMARK_REWARDS, "gated": gated_exact_match}),),
        baselines={"naive-rag": NaiveRag(search, system=RAG_SYSTEM, max_output=MAX_OUTPUT)},
        rewards=("em", "f1", "sub_match", "gated"),
        recipe={"reward_weights": {"gated": 1.0, "em": 0.0, "f1": 0.0, "sub_match": 0.0}},
        evaluation=evaluation,
        validation="validation" if splits["validation"] else None,
        whole=whole_split(splits),
        retrieval=recall_function(splits, retriever),
        solutions=_solutions(splits),
    )


def _own_passages(name: str, splits: Splits[Question]) -> tuple[Passage, ...]:
    passages = unique(passage for question in all_questions(splits) for passage in question.context)
    if not passages:
        do = "give the file of passages, as the questions have none"
        raise InvalidInput(f"--corpus for {name}", got="nothing", do=do)
    return passages


def _solutions(splits: Splits[Question]) -> Callable[[Task], ReferenceSolutions]:
    answers = list(dict.fromkeys(question.answers[0] for question in all_questions(splits)))

    def of(task: Task) -> ReferenceSolutions:
        gold = task.data["answers"]
        rules = (normalize, benchmark_normalize)
        others = (each for each in answers if not any(exact_match_score(each, gold, rule) for rule in rules))
        other = next(others, f"not {gold[0]}")
        searches = (tool_call("search", query=task.messages[-1].text),)
        # Not sub_match: the wrong solution that repeats the question may contain the right answer.
        return answer_solutions(task, searches, other, MAX_TURNS, {"em": 1.0, "f1": 1.0, "gated": 1.0})

    return of


def recall_function(
    splits: Splits[Question], retriever: Retriever, k: int = TOP_K
) -> Callable[[str], Mapping[str, float]] | None:
    """Return a function that measures the retriever's :func:`recall` on a split, such as ``{"recall@5": 0.62}``.

    Return None if no question of any split has supporting titles. The function returns {} if no question of its split
    has supporting titles, or if the search fails.
    """
    if not any(question.supporting for question in all_questions(splits)):
        return None

    def of(split: str) -> Mapping[str, float]:
        questions = [question for question in splits[split] if question.supporting]
        try:
            return {f"recall@{k}": recall(questions, retriever, k)} if questions else {}
        except RetrievalError as error:
            _log.warning("recall@%d of %s was not measured: %s", k, split, error)
            return {}

    return of


def recall(questions: Sequence[Question], retriever: Retriever, k: int = TOP_K) -> float:
    """Return the mean recall of the retriever over the questions, in [0, 1].

    The recall of a question is the share of its supporting titles, of which there must be some, in the first ``k``
    passages that are found.
    """
    found = retriever.search([question.text for question in questions], k)
    shares = [
        len(set(question.supporting) & {passage.title for passage in passages}) / len(question.supporting)
        for question, passages in zip(questions, found, strict=True)
    ]
    return sum(shares) / len(shares)
