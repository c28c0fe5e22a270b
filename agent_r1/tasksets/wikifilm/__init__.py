"""``wikifilm``: questions about films and directors. The agent searches Wikipedia pages that the user provides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.retrieval.config import IndexConfig
from agent_r1.retrieval.open import build_index, open_retriever
from agent_r1.retrieval.tool import search_tool, search_tool_with_question
from agent_r1.rewards.scoring import FunctionScorer, exact_match, exact_match_score, f1, final_answer
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.multihop import recall_function
from agent_r1.tasksets.multihop.questions import Question
from agent_r1.tasksets.pages import share_of_pages
from agent_r1.tasksets.splits import Splits, hash_order, tasks_function
from agent_r1.tasksets.wikifilm.examples import EXAMPLES, INSTRUCTION, READING, READING_EXAMPLES
from agent_r1.tasksets.wikifilm.facts import read_facts
from agent_r1.tasksets.wikifilm.pages import SHOWN, ShortPages, read_pages
from agent_r1.tasksets.wikifilm.questions import build_questions
from agent_r1.tasksets.wikifilm.settings import KINDS, Settings, read_settings

TITLE = 200
"""The number of characters that a search result reserves for the title of one page."""

QUESTION = 400
"""The number of characters that a search result reserves for the question. Every search result repeats the question."""

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "group_size": 8,
    "groups_per_step": 8,
    "max_tokens": 48,
    "context": 4096,
    "reward_weights.f1": 0.0,
    "reward_weights.pages_read": 0.0,
    "reward_weights.supported": 0.0,
}
"""The default settings for training on this task set. Only the reward ``em`` has a weight other than 0."""


def build(data: Path | None, corpus: str | Path | None, seed: int, encoder: str = "") -> TaskSet:
    """Build the task set from pages about films.

    ``data`` holds these pages, or is a TOML file (see ``Settings``) that says where the pages are. If ``corpus`` is
    None, the agent searches the pages from which the questions are built. Raises InvalidInput if a file is missing or
    malformed, or if the pages have too few films for questions.
    """
    settings = read_settings(data)
    pages = read_pages(settings.data)
    splits = _splits(settings, build_questions(read_facts(pages)), seed)
    retriever = ShortPages(
        build_index(IndexConfig(encoder=encoder), pages) if corpus is None else open_retriever(corpus, encoder)
    )
    search = search_tool_with_question(retriever, settings.pages)
    retrieve = search_tool(retriever, settings.pages)
    max_output = settings.pages * (SHOWN + TITLE) + QUESTION
    rewards = {"em": exact_match, "f1": f1, "pages_read": pages_read, "supported": supported}
    return TaskSet(
        name="wikifilm",
        env=ToolEnv([search], max_turns=settings.turns, system=INSTRUCTION, examples=EXAMPLES, max_output=max_output),
        tasks=tasks_function(splits, settings.data),
        scorers=(FunctionScorer(rewards),),
        baselines={"naive-rag": NaiveRag(retrieve, system=READING, examples=READING_EXAMPLES, max_output=max_output)},
        recipe=RECIPE,
        evaluation=tuple(kind for kind in KINDS if splits[kind]),
        validation="validation" if splits["validation"] else None,
        retrieval=recall_function(splits, retriever, settings.pages),
        kind=lambda task: len(task.data["supporting"]),
        solutions=partial(solutions, max_turns=settings.turns),
    )


def _splits(settings: Settings, questions: Mapping[str, tuple[Question, ...]], seed: int) -> Splits[Question]:
    """Return the questions by split. The test questions of each kind, such as ``2-hop``, are a separate split.

    Raises InvalidInput if there are no training or no test questions.
    """
    train = [one for one in questions["train"] if _kind(one) in settings.kinds]
    for owner, found in (("train", train), ("test", questions["test"])):
        if not found:
            got = f"pages without {owner} questions"
            raise InvalidInput(str(settings.data), got=got, do="give more pages about films and their directors")
    test = hash_order(questions["test"], "split")
    return {
        "train": hash_order(train, str(seed)),
        "validation": hash_order(questions["validation"], "split"),
        **{kind: tuple(one for one in test if _kind(one) == kind) for kind in KINDS},
    }


def _kind(question: Question) -> str:
    return question.id.partition("/")[0]


def pages_read(trajectory: Trajectory, task: Task) -> float:
    """Return the share of the needed pages that the searches of an attempt found, from 0 to 1."""
    return share_of_pages(trajectory, task.data["supporting"])


def supported(trajectory: Trajectory, task: Task) -> float:
    """Return :func:`pages_read` if the attempt gives an answer, right or wrong; else 0.0.

    Without this condition, an agent is rewarded for searches alone, and learns never to answer.
    """
    return 0.0 if final_answer(trajectory) is None else pages_read(trajectory, task)


def solutions(task: Task, max_turns: int) -> ReferenceSolutions:
    supporting, answers = task.data["supporting"], task.data["answers"]
    searches = tuple(tool_call("search", query=title) for title in supporting)
    other = next(title for title in (*supporting[:2], "nobody") if not exact_match_score(title, answers))
    return answer_solutions(task, searches, other, max_turns, {"em": 1.0, "f1": 1.0})
