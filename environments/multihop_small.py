"""``multihop_small``: multi-hop questions of benchmarks with short search results, for small models and small machines.

The questions are those of a mixture file (HotpotQA, 2WikiMultihopQA, MuSiQue: ``agent_r1.tasksets.multihop``), the
search is BM25 over ``--corpus``. Training takes the questions whose supporting passages can be found one after the
other: the question or a passage before it names the title of each. So each training question has a solution that an
agent could have found, for ``agent-r1 sft --from_solutions``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.text import fold
from agent_r1.envs.tool_env import NaiveRag, SingleTurnEpisode, ToolEnv, opening_messages
from agent_r1.retrieval.client import open_retriever
from agent_r1.retrieval.retriever import Found, Passage, Retriever, render, search_tool, search_tool_with_question
from agent_r1.rewards.scoring import BENCHMARK_REWARDS, FunctionScorer, exact_match_score
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.files import tasks_function
from agent_r1.tasksets.multihop import recall_function
from agent_r1.tasksets.multihop.mixture import read_mixture
from agent_r1.tasksets.multihop.questions import Question
from environments.shared import page_rewards, solved_example

INSTRUCTION = (
    "Search for one page at a time. When you know the answer, reply with <answer>answer</answer>, "
    "in as few words as possible."
)
READING = "Read the pages and reply with <answer>answer</answer>, in as few words as possible."

PAGES, WORDS, TURNS = 2, 80, 4
"""Passages per search, words of a passage that are shown, and actions of an episode: three searches and the answer."""

MAX_OUTPUT = 8000  # characters; the words are the limit

# The people, towns and bands of the examples are invented.
_HALVE = Passage("Nils Halvegaard", "Nils Halvegaard (born 2 May 1931 in Orrby) was a Danish composer of film music.")
_ORRBY = Passage("Orrby", "Orrby is a fishing town in the county of Vestmark. In 1930 it had 2,100 inhabitants.")
_QUILL = Passage("The Quill Foxes", "The Quill Foxes are a folk band from Leith that was formed in 1998.")
_SALT = Passage("Salt Harbour", "Salt Harbour is a Canadian rock band, formed in Halifax in 1987.")

EXAMPLES: tuple[Message, ...] = (
    *solved_example("In which county was the composer Nils Halvegaard born?", "Vestmark", _HALVE, _ORRBY),
    *solved_example("Which band was formed first, The Quill Foxes or Salt Harbour?", "Salt Harbour", _QUILL, _SALT),
)
READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_HALVE, _ORRBY))}\n\nIn which county was the composer Nils Halvegaard born?"),
    Message.assistant("<answer>Vestmark</answer>"),
    Message.user(f"{render((_QUILL, _SALT))}\n\nWhich band was formed first, The Quill Foxes or Salt Harbour?"),
    Message.assistant("<answer>Salt Harbour</answer>"),
)

RECIPE: Mapping[str, Any] = {
    "max_tokens": 48,
    "context": 2048,
    "reward_weights.f1": 0.0,
    "reward_weights.sub_match": 0.0,
    "reward_weights.pages_read": 0.0,
    "reward_weights.supported": 0.0,
}


@dataclass(frozen=True, slots=True)
class ShortPassages:
    """A retriever that cuts the passages that another retriever finds after ``WORDS`` words."""

    retriever: Retriever

    def search(self, queries: Sequence[str], k: int = PAGES) -> Found:
        return [tuple(map(cut, found)) for found in self.retriever.search(queries, k)]


def cut(passage: Passage) -> Passage:
    words = passage.text.split()
    return passage if len(words) <= WORDS else replace(passage, text=" ".join(words[:WORDS]) + " ...")


@dataclass(slots=True)
class GivenPassages:
    """An environment with one turn whose prompt holds the supporting passages: what reading alone can reach."""

    passages: Mapping[str, tuple[Passage, ...]]  # by the id of the task
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> SingleTurnEpisode:
        *opening, question = opening_messages(task, READING, READING_EXAMPLES)
        text = f"{render(self.passages[task.id])}\n\n{question.text}"
        return SingleTurnEpisode((*opening, replace(question, parts=(Text(text),))))


def build(data: Path, seed: int, corpus: str | Path | None = None, encoder: str = "") -> TaskSet:
    """Build the task set from the mixture file ``data``. Raise InvalidInput without a corpus."""
    if corpus is None:
        raise InvalidInput("--corpus", got="nothing", do="give the file of passages (JSONL with title and text)")
    splits, evaluation = read_mixture(data, seed)
    splits = {**splits, "train": tuple(one for one in splits["train"] if chain(one) is not None)}
    supporting = {
        f"{split}/{one.id}": tuple(cut(passage) for passage in one.context if passage.title in one.supporting)
        for split, questions in splits.items()
        for one in questions
    }
    chains = {one.text: chain(one) or one.supporting for questions in splits.values() for one in questions}

    def solutions(task: Task) -> ReferenceSolutions:
        titles = chains[task.messages[-1].text][: TURNS - 1]  # a question can have more pages than searches
        searches = tuple(tool_call("search", query=title) for title in titles)
        return answer_solutions(task, searches, "nobody knows", TURNS, {"em": 1.0, "f1": 1.0})

    retriever = ShortPassages(open_retriever(corpus, encoder))
    search, retrieve = search_tool_with_question(retriever, PAGES), search_tool(retriever, PAGES + 1)
    return TaskSet(
        name="multihop_small",
        env=ToolEnv([search], max_turns=TURNS, system=INSTRUCTION, max_output=MAX_OUTPUT),
        tasks=tasks_function(splits, data),
        scorers=(FunctionScorer({**BENCHMARK_REWARDS, **page_rewards(lambda task: task.data["supporting"])}),),
        baselines={
            "naive-rag": NaiveRag(retrieve, system=READING, examples=READING_EXAMPLES, max_output=MAX_OUTPUT),
            "gold-passages": GivenPassages(supporting),
            "with-examples": ToolEnv(
                [search], max_turns=TURNS, system=INSTRUCTION, examples=EXAMPLES, max_output=MAX_OUTPUT
            ),
        },
        rewards=("em", "f1", "sub_match", "pages_read", "supported"),
        recipe=RECIPE,
        evaluation=evaluation,
        validation="validation" if splits["validation"] else None,
        retrieval=recall_function(splits, retriever, PAGES + 1),
        solutions=solutions,
    )


def chain(question: Question) -> tuple[str, ...] | None:
    """Return the titles of the supporting passages in an order in which each is named before it is searched.

    The question names a title, or a passage that was read before does; a title such as "Blow (film)" is named by
    "Blow". None if there is no such order, or if the passages, cut as in a search result, do not hold the answer.
    """
    passages = {passage.title: cut(passage) for passage in question.context}
    left = [title for title in question.supporting if title in passages]
    if not left or len(left) != len(question.supporting) or len(left) >= TURNS:
        return None
    known, order = fold(question.text), list[str]()
    while left:
        named = [title for title in left if fold(title.partition(" (")[0]) in known]
        if not named:
            return None
        order.append(named[0])
        left.remove(named[0])
        known += "\n" + fold(passages[named[0]].text)
    gold = question.answers[0]
    read = " ".join(passages[title].text for title in order)
    answered = exact_match_score(gold, ("yes",)) or exact_match_score(gold, ("no",)) or fold(gold) in fold(read)
    return tuple(order) if answered else None
