"""The questions of TinyWiki, with a search that sometimes fails and sometimes returns an outdated edition of a page.

A page of TinyWiki gives a value for each of several relations. For example, the value "Bruno" for the relation "mayor"
means that the mayor is Bruno. An outdated edition has the same relations and the same values as the true page, but
gives each value for a wrong relation.

An agent cannot recognize an outdated edition from a single search. But two outdated editions of a page differ from each
other. So a page is true if two searches in an episode return the same text. The agent learns to repeat a failed search
and to check a page. Only the final answer is rewarded.

The rates of failures and outdated editions depend on the split. In all attempts at a task, the first search for a page
has the same result. The second search for the page also has the same result in all attempts, and so on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import permutations
from typing import Literal

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tasksets.answers import answer, reference
from agent_r1.tasksets.tinywiki import questions
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE
from agent_r1.tasksets.tinywiki.wiki import NOTHING, Chain, Wiki, first_title, open_wiki
from agent_r1.tools.function_tool import Resources, tool

MAX_TURNS = 20
"""A right solution needs at most 19 actions: 6 searches for each of at most 3 pages, and the answer."""

FRESH = 3
"""The number of searches in a block. The searches for a page form blocks: searches 1 to 3, searches 4 to 6, ..

In each block, one search is certain to return the true page, so every task can be solved. The position of this search
in the block is random, so the agent must compare results.
"""

Fortune = Literal["fresh", "old", "failed"]


@dataclass(frozen=True, slots=True)
class Rates:
    """The probabilities that a search fails, and that it returns an outdated page (but see ``FRESH``)."""

    failed: float
    old: float


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the task set. ``questions`` is the TinyWiki split from which the questions come."""

    questions: str
    rates: Rates


SPLITS: Mapping[str, Split] = {
    "train": Split("train", Rates(failed=0.2, old=0.2)),
    "validation": Split("validation", Rates(failed=0.2, old=0.2)),
    "reliable": Split("style-a", Rates(failed=0.0, old=0.0)),
    "failing": Split("style-a", Rates(failed=0.3, old=0.0)),
    "old-pages": Split("style-a", Rates(failed=0.0, old=0.3)),
}


@dataclass(slots=True)
class PageCounts:
    """How often the agent has searched for each page in one episode."""

    asked: Counter[str] = field(default_factory=Counter)

    async def close(self) -> None:
        """Do nothing."""


class OpenPageCounts:
    """Gives each episode its own :class:`PageCounts`."""

    async def open(self, task: Task, context: RolloutContext) -> PageCounts:
        return PageCounts()


_DESKS = OpenPageCounts()


@tool
async def search(query: str, task: Task, resources: Resources) -> str:
    """Find a page.

    Args:
        query: what to find
    """
    title = first_title(_wiki(task), query)
    if title is None:
        return NOTHING
    desk = await resources.get(_DESKS)
    desk.asked[title] += 1
    return edition(task, title, desk.asked[title])


def edition(task: Task, title: str, nth: int) -> str:
    """Return the text that the search number ``nth`` (from 1, in an episode) for the page ``title`` finds.

    Raises ConnectionError if the search fails.
    """
    match search_outcome(task, title, nth):
        case "failed":
            raise ConnectionError("try again")
        case "old":
            return old(task, title, nth).page(title)
        case "fresh":
            return _wiki(task).page(title)


def search_outcome(task: Task, title: str, nth: int) -> Fortune:
    """Return the outcome of a search: "failed", "old" (outdated edition) or "fresh" (true page)."""
    if nth == _surely_fresh(task, title, nth):
        return "fresh"
    rates: Rates = task.data["rates"]
    drawn = _luck(task, title, f"{nth}").random()
    if drawn < rates.failed:
        return "failed"
    return "old" if drawn < rates.failed + rates.old else "fresh"


def _surely_fresh(task: Task, title: str, nth: int) -> int:
    # The number of the certain search in the block of search ``nth``: 4, 5 or 6 for the 5th search (see FRESH).
    three = (nth - 1) // FRESH
    return 1 + three * FRESH + _luck(task, title, f"fresh/{three}").randrange(FRESH)


def _luck(task: Task, title: str, what: str) -> random.Random:
    return random.Random(f"{task.data['wiki']}/{task.id}/{title}/{what}")


def old(task: Task, title: str, nth: int) -> Wiki:
    """Return a wiki with one page: the outdated edition of the page ``title`` that search ``nth`` can return.

    Each value of the true page stands at a wrong relation. Any two of the first four editions of a page differ in the
    value of every relation, because the cyclic shifts come first.
    """
    # 5 values have 44 derangements, and 2 of 3 searches can be outdated, so the first 66 searches repeat no edition.
    relations, values = zip(*_wiki(task).facts[title].items(), strict=True)
    before = (nth - 1) // FRESH * (FRESH - 1) + (nth - 1) % FRESH - (nth > _surely_fresh(task, title, nth))
    shifts, others = _rearrangements(len(values))
    orders = (*_luck(task, title, "old").sample(shifts, len(shifts)), *others)
    order = orders[before % len(orders)]
    return Wiki({title: dict(zip(relations, (values[place] for place in order), strict=True))})


Order = tuple[int, ...]


@cache
def _rearrangements(count: int) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
    # The derangements of 0 .. count - 1: the cyclic shifts, then the others
    shifts = tuple(tuple((place + by) % count for place in range(count)) for by in range(1, count))
    moved = (order for order in permutations(range(count)) if all(at != place for place, at in enumerate(order)))
    return shifts, tuple(order for order in moved if order not in shifts)


def build(seed: int) -> TaskSet:
    """Build the task set. ``seed`` determines the training tasks."""
    return TaskSet(
        name="unreliable",
        env=ToolEnv([search], max_turns=MAX_TURNS),
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"em": exact_match}),),
        rewards=("em",),
        recipe={**TINY_BASE_RECIPE, "context": 1024},
        evaluation=("reliable", "failing", "old-pages"),
        validation="validation",
        solutions=solutions,
    )


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("split of unreliable", got=split, do=f"give one of {', '.join(SPLITS)}")
    made = SPLITS[split]
    return tuple(
        replace(task, id=f"{split}/{index}", data={**task.data, "rates": made.rates}, split=split)
        for index, task in enumerate(questions.tasks(made.questions, seed))
    )


def solutions(task: Task) -> ReferenceSolutions:
    chain: Chain = task.data["chain"]
    titles = chain.pages
    # search for each page until two searches have returned the true page
    searches = [tool_call("search", query=title) for title in titles for _ in range(_needed(task, title))]
    others = [value for value in _wiki(task).facts[titles[-1]].values() if value != chain.answer]
    return ReferenceSolutions(
        gold=(reference("what was read twice alike", *searches, answer(chain.answer)),),
        wrong=(
            reference("another value of the page", *searches, answer(others[0])),
            reference("one page too early", searches[0], answer(titles[-1])),
            reference("searches to the end", *(searches[:1] * MAX_TURNS)),
        ),
        expected_rewards={"em": 1.0},
    )


def _needed(task: Task, title: str) -> int:
    fresh = time = 0
    while fresh < 2:
        time += 1
        fresh += search_outcome(task, title, time) == "fresh"
    return time


def _wiki(task: Task) -> Wiki:
    return open_wiki(task.data["wiki"])
