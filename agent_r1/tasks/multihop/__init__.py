"""Multi-hop questions over a corpus of passages: HotpotQA, 2WikiMultihopQA, MuSiQue, with BM25 search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.world import World
from agent_r1.env.naive_rag import NaiveRag
from agent_r1.env.rewards import exact_match, f1, gated_exact_match, sub_match
from agent_r1.env.scoring import FunctionScorer
from agent_r1.env.toolenv import ToolEnv
from agent_r1.tasks.multihop.corpus import Passage, read_corpus, unique
from agent_r1.tasks.multihop.search import TOP_K, PassageIndex, search_tool
from agent_r1.tasks.multihop.splits import Splits, read_splits

MAX_TURNS = 5
WHOLE = "all"
MAX_OUTPUT = 4000
"""Characters of a search result: five passages of Wikipedia's usual length. The paper's 2048 cut the last ones off."""

AGENT_SYSTEM = (
    "Answer the question. Look facts up with the search tool, one at a time and as often as you need. "
    "When you know the answer, give it in as few words as possible between <answer> and </answer>."
)
RAG_SYSTEM = (
    "Answer the question at the end with the help of the passages before it. "
    "Give the answer in as few words as possible between <answer> and </answer>."
)


def build(name: str, data: Path | None, corpus: Path | None, seed: int) -> World:
    """The world of one benchmark.

    Args:
        name: what the world is called, such as ``hotpotqa``.
        data: a file of questions, or a folder with one per split (see ``splits``).
        corpus: a file of passages; without it, those that came with the questions are searched.
        seed: orders the training questions.

    Raises:
        InvalidInput: a file is missing or broken, or there are no passages to search.
    """
    if data is None:
        raise InvalidInput(f"--data for {name}", got="nothing", do="give the file of its questions")
    splits = read_splits(data, seed)
    splits = {**splits, WHOLE: tuple(chain(*splits.values()))}
    index = PassageIndex(_passages(name, splits, corpus))
    search = search_tool(index)
    return World(
        name=name,
        env=ToolEnv([search], max_turns=MAX_TURNS, system=AGENT_SYSTEM, max_output=MAX_OUTPUT),
        tasks=_tasks(splits, data),
        scorers=(FunctionScorer({"em": exact_match, "f1": f1, "sub_match": sub_match, "gated": gated_exact_match}),),
        baselines={"naive-rag": NaiveRag(search, system=RAG_SYSTEM, max_output=MAX_OUTPUT)},
        recipe={"reward_weights": {"gated": 1.0, "em": 0.0, "f1": 0.0, "sub_match": 0.0}},
        evaluation=("test",),
        validation="validation" if splits["validation"] else None,
        whole=WHOLE,
        retrieval=_retrieval(splits, index),
    )


def _passages(name: str, splits: Splits, corpus: Path | None) -> Sequence[Passage]:
    if corpus is not None:
        return read_corpus(corpus)
    passages = unique(passage for question in chain(*splits.values()) for passage in question.context)
    if not passages:
        raise InvalidInput(
            f"--corpus for {name}", got="nothing", do="give the file of passages, as the questions have none"
        )
    return passages


def _tasks(splits: Splits, data: Path) -> Callable[[str], Sequence[Task]]:
    tasks = {split: tuple(question.task(split) for question in questions) for split, questions in splits.items()}

    def of(split: str) -> Sequence[Task]:
        if not tasks.get(split):
            there = ", ".join(name for name, some in tasks.items() if some)
            raise InvalidInput(f"split of {data}", got=repr(split), do=f"use one that it has: {there}")
        return tasks[split]

    return of


def _retrieval(splits: Splits, index: PassageIndex) -> Callable[[str], Mapping[str, float]] | None:
    """Recall of the supporting titles by one search for the question; None where no question names any."""
    if not any(question.supporting for question in chain(*splits.values())):
        return None

    def of(split: str) -> Mapping[str, float]:
        questions = [question for question in splits[split] if question.supporting]
        if not questions:
            return {}
        found = index.search([question.text for question in questions])
        recalls = [
            len(set(question.supporting) & {passage.title for passage in passages}) / len(question.supporting)
            for question, passages in zip(questions, found, strict=True)
        ]
        return {f"recall@{TOP_K}": sum(recalls) / len(recalls)}

    return of
