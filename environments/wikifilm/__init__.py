"""``wikifilm``: questions about films and directors. The agent searches Wikipedia pages that the user provides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.retrieval.client import build_index, open_retriever
from agent_r1.retrieval.config import IndexConfig
from agent_r1.retrieval.retriever import Passage, render, search_tool, search_tool_with_question
from agent_r1.rewards.scoring import FunctionScorer, exact_match, exact_match_score, f1
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.files import DataSettings, Splits, hash_order, read_settings, tasks_function
from agent_r1.tasksets.multihop import recall_function
from agent_r1.tasksets.multihop.questions import Question
from environments.shared import page_rewards, solved_example
from environments.wikifilm.films import SHOWN, ShortPages, read_facts, read_pages
from environments.wikifilm.questions import build_questions

INSTRUCTION = (
    "Search for one film or person at a time. When you know the answer, reply with <answer>answer</answer>. "
    "Answer with a name, a place, a date, a nationality, a film, yes or no."
)
READING = "Read the pages and reply with <answer>answer</answer>."

_LETTER = Passage("A Letter to Ebba", "A Letter to Ebba is a 1938 Danish film directed by Asger Tolne.")
_WARDENS = Passage(
    "The Quay Wardens", "The Quay Wardens is a 1974 comedy film directed by Ottilie Brakholm and starring Nils Aaberg."
)
_OTTILIE = Passage("Ottilie Brakholm", "Ottilie Brakholm (born 9 March 1921 in Turku) is a Finnish film director.")
_SALT = Passage("Salt on the Quay", "Salt on the Quay is a 1961 Swedish drama film directed by Edda Lindqvane.")
_EDDA = Passage(
    "Edda Lindqvane",
    "Edda Lindqvane (December 4, 1919 - May 2, 1990) was a Swedish film director. She was born in Visby, Sweden.",
)
_OLLE = Passage("Olle Lindqvane", "Olle Lindqvane (born 1948) is a Swedish actor.")

# Two examples of two hops: with only one, a model often leaves out the second search. The films are invented.
EXAMPLES: tuple[Message, ...] = (
    *solved_example("Who is the director of film A Letter to Ebba?", "Asger Tolne", _LETTER),
    *solved_example("When was the director of film The Quay Wardens born?", "9 March 1921", _WARDENS, _OTTILIE),
    *solved_example("Where was the director of film Salt on the Quay born?", "Visby", _SALT, _EDDA),
)
READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_EDDA, _OLLE))}\n\nWhere was Edda Lindqvane born?"),
    Message.assistant("<answer>Visby</answer>"),
)

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

Kind = Literal["1-hop", "2-hop", "comparison", "bridge-comparison"]

KINDS: tuple[Kind, ...] = ("1-hop", "2-hop", "comparison", "bridge-comparison")
"""The kinds of questions. The id of a question begins with its kind.

- 1-hop and 2-hop: one fact, or a chain of two facts, leads to the answer.
- comparison: the question compares two films.
- bridge-comparison: the question compares two films by facts about their directors.
"""


class Settings(DataSettings):
    """The settings in a TOML file. The questions of validation and test depend only on ``data``, the pages.

    Example of a file:

        data = "pages.jsonl"
        kinds = ["1-hop"]
    """

    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1)
    """The kinds of questions in the training split."""

    pages: int = Field(default=3, ge=1)
    """The maximum number of pages that a search returns."""

    turns: int = Field(default=7, ge=1)
    """The maximum number of actions in an episode: the searches and the answer. A question of the kind
    "bridge-comparison" (see ``KINDS``) needs four searches."""


def build(data: Path, seed: int, corpus: str | Path | None = None, encoder: str = "") -> TaskSet:
    """Build the task set from pages about films.

    ``data`` holds these pages, or is a TOML file (see ``Settings``) that says where the pages are. If ``corpus`` is
    None, the agent searches the pages from which the questions are built. Raises InvalidInput if a file is missing or
    malformed, or if the pages have too few films for questions.
    """
    settings = read_settings(Settings, data)
    pages = read_pages(settings.data)
    splits = _splits(settings, build_questions(read_facts(pages)), seed)
    retriever = ShortPages(
        build_index(IndexConfig(encoder=encoder), pages) if corpus is None else open_retriever(corpus, encoder)
    )
    search = search_tool_with_question(retriever, settings.pages)
    retrieve = search_tool(retriever, settings.pages)
    max_output = settings.pages * (SHOWN + TITLE) + QUESTION
    rewards = {"em": exact_match, "f1": f1, **page_rewards(lambda task: task.data["supporting"])}
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


def solutions(task: Task, max_turns: int) -> ReferenceSolutions:
    supporting, answers = task.data["supporting"], task.data["answers"]
    searches = tuple(tool_call("search", query=title) for title in supporting)
    other = next(title for title in (*supporting[:2], "nobody") if not exact_match_score(title, answers))
    return answer_solutions(task, searches, other, max_turns, {"em": 1.0, "f1": 1.0})
