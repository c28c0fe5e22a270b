"""``wikifilm``: questions about films and their directors. The agent searches pages of Wikipedia.

The user gives the pages from which the questions are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.reference_solution import ReferenceSolutions, tool_call
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs import NaiveRag, ToolEnv
from agent_r1.retrieval.bm25 import BM25Index
from agent_r1.retrieval.open import open_retriever
from agent_r1.retrieval.tool import search_tool
from agent_r1.rewards import FunctionScorer, exact_match, f1
from agent_r1.rewards.normalization import exact_match_score
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.multihop import recall_function
from agent_r1.tasksets.multihop.questions import Question
from agent_r1.tasksets.pages import share_of_pages
from agent_r1.tasksets.splits import Splits, hash_order, tasks_function
from agent_r1.tasksets.wikifilm.examples import EXAMPLES, INSTRUCTION, READING, READING_EXAMPLES
from agent_r1.tasksets.wikifilm.facts import read_facts
from agent_r1.tasksets.wikifilm.pages import TOP_K, ShortPages, read_pages
from agent_r1.tasksets.wikifilm.questions import KINDS, build_questions

MAX_TURNS = 7

MAX_OUTPUT = 2400
"""The largest number of characters of a search result: all shown pages with their titles."""

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "group_size": 8,
    "groups_per_step": 8,
    "max_tokens": 48,
    "context": 4096,
    "reward_weights.f1": 0.0,
    "reward_weights.pages_read": 0.0,
}
"""Default settings. Only exact match is rewarded; F1 and ``pages_read`` are measured, but have weight 0."""


def build(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    """Build the task set.

    Args:
        data: the pages that the questions are built from (see ``pages.read_pages``).
        corpus: the corpus to search (see ``retrieval.open``); None for the pages of ``data``, searched with BM25.
        seed: orders the training questions.

    Raises:
        InvalidInput: a file is missing or malformed, or has too few films for questions.
    """
    if data is None:
        raise InvalidInput("--data for wikifilm", got="nothing", do="give a file of Wikipedia's pages about films")
    pages = read_pages(data)
    splits = _splits(data, build_questions(read_facts(pages)), seed)
    retriever = ShortPages(BM25Index(pages) if corpus is None else open_retriever(corpus))
    search = search_tool(retriever, TOP_K)
    return TaskSet(
        name="wikifilm",
        env=ToolEnv([search], max_turns=MAX_TURNS, system=INSTRUCTION, examples=EXAMPLES, max_output=MAX_OUTPUT),
        tasks=tasks_function(splits, data),
        scorers=(FunctionScorer({"em": exact_match, "f1": f1, "pages_read": pages_read}),),
        baselines={"naive-rag": NaiveRag(search, system=READING, examples=READING_EXAMPLES, max_output=MAX_OUTPUT)},
        recipe=RECIPE,
        evaluation=tuple(kind for kind in KINDS if splits[kind]),
        validation="validation" if splits["validation"] else None,
        retrieval=recall_function(splits, retriever, TOP_K),
        solutions=solutions,
    )


def _splits(data: Path, questions: Mapping[str, tuple[Question, ...]], seed: int) -> Splits[Question]:
    """Return the questions by split. The test questions of each kind, such as ``2-hop``, are a split of their own.

    Raises InvalidInput if there are no training or no test questions.
    """
    for owner in ("train", "test"):
        if not questions[owner]:
            got = f"pages without {owner} questions"
            raise InvalidInput(str(data), got=got, do="give more pages about films and their directors")
    test = hash_order(questions["test"], "split")
    return {
        "train": hash_order(questions["train"], str(seed)),
        "validation": hash_order(questions["validation"], "split"),
        **{kind: tuple(one for one in test if one.id.split("/")[0] == kind) for kind in KINDS},
    }


def pages_read(trajectory: Trajectory, task: Task) -> float:
    """Return which share of the needed pages the searches of an attempt found, from 0 to 1.

    The needed pages are the pages with the facts from which the answer follows.
    """
    return share_of_pages(trajectory, task.data["supporting"])


def solutions(task: Task) -> ReferenceSolutions:
    """Return the reference solutions of a task.

    The right solutions give the answer, with or without a search for each page. A wrong solution, for example, answers
    with a title in place of a fact, or with the other film.
    """
    supporting, answers = task.data["supporting"], task.data["answers"]
    searches = tuple(tool_call("search", query=title) for title in supporting)
    other = next(title for title in (*supporting[:2], "nobody") if not exact_match_score(title, answers))
    return answer_solutions(task, searches, other, MAX_TURNS, {"em": 1.0, "f1": 1.0})
