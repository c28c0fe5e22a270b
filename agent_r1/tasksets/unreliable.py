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
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet, script, tool_call
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tasksets.generated import refuse_files
from agent_r1.tasksets.tinywiki import questions
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE
from agent_r1.tasksets.tinywiki.search import NOTHING
from agent_r1.tasksets.tinywiki.wiki import Chain, Wiki, open_wiki
from agent_r1.tools.function_tool import Resources, tool

MAX_TURNS = 20
"""The maximum number of actions in an episode.

A right solution needs at most 19 actions: 6 searches for each of at most 3 pages, and the answer.
"""

FRESH = 3
"""The number of searches in a block. The searches for a page form blocks: searches 1 to 3, searches 4 to 6, ..

In each block, one search is certain to return the true page, so every task can be solved. The position of this search
in the block is random, so the agent must compare results.
"""

Fortune = Literal["fresh", "old", "failed"]


@dataclass(frozen=True, slots=True)
class Rates:
    """The probability that a search fails, and the probability that a search returns an outdated page.

    The probabilities do not apply to the searches that are certain to return the true page (see ``FRESH``).

    Example:
        Rates(failed=0.2, old=0.2)
    """

    failed: float
    old: float


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the task set.

    Attributes:
        questions: the TinyWiki split from which the questions come.
        rates: how often searches fail or return outdated pages.
    """

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
    """An :class:`~agent_r1.tools.function_tool.Opener` that gives each episode its own :class:`PageCounts`."""

    async def open(self, task: Task, context: RolloutContext) -> PageCounts:
        return PageCounts()


_DESKS = OpenPageCounts()


@tool
async def search(query: str, task: Task, resources: Resources) -> str:
    """Find a page.

    Args:
        query: what to find
    """
    titles = [word for word in re.findall(r"\w+", query) if word in _wiki(task).facts]
    if not titles:
        return NOTHING
    desk = await resources.get(_DESKS)
    desk.asked[titles[0]] += 1
    return edition(task, titles[0], desk.asked[titles[0]])


def edition(task: Task, title: str, nth: int) -> str:
    """Return the text that a search for a page finds: the text of the true page or of an outdated edition.

    ``title`` is the title of the page. ``nth`` is the number of the search: in an episode, the searches for this page
    are numbered from 1. Raises ConnectionError if the search fails.
    """
    match search_outcome(task, title, nth):
        case "failed":
            raise ConnectionError("try again")
        case "old":
            return old(task, title, nth).page(title)
        case "fresh":
            return _wiki(task).page(title)


def search_outcome(task: Task, title: str, nth: int) -> Fortune:
    """Return the outcome of a search for a page: "failed", "old" (outdated edition) or "fresh" (true page).

    ``title`` is the title of the page. ``nth`` is the number of the search: in an episode, the searches for this page
    are numbered from 1.
    """
    if nth == _surely_fresh(task, title, nth):
        return "fresh"
    rates: Rates = task.data["rates"]
    drawn = _luck(task, title, f"{nth}").random()
    if drawn < rates.failed:
        return "failed"
    return "old" if drawn < rates.failed + rates.old else "fresh"


def _surely_fresh(task: Task, title: str, nth: int) -> int:
    """Return the number of a search that is certain to return the true page.

    The searches for a page are numbered from 1, and every three searches form a block (see ``FRESH``). In each block,
    one search is certain to return the true page. The argument ``nth`` is the number of any search. The result is the
    number of the certain search in the same block.

    Example:
        4, 5 or 6 if ``nth`` is 5, because the searches 4 to 6 are one block
    """
    three = (nth - 1) // FRESH
    return 1 + three * FRESH + _luck(task, title, f"fresh/{three}").randrange(FRESH)


def _luck(task: Task, title: str, what: str) -> random.Random:
    return random.Random(f"{task.data['wiki']}/{task.id}/{title}/{what}")


def old(task: Task, title: str, nth: int) -> Wiki:
    """Return a wiki that contains only one page: an outdated edition of the page with the title ``title``.

    ``nth`` is the number of the search for this page, from 1. The outdated edition has the values of the true page, but
    each value stands at a wrong relation. A page has five values. There are 44 ways to reorder five values so that each
    value moves, so a page has 44 outdated editions. In each block of three searches, two searches can return an
    outdated edition (see ``FRESH``). So 44 of the first 66 searches can return an outdated edition, each search a
    different edition. Any two of the first four editions differ in the value of every relation.

    Example:
        Shortened to three relations: if the true page is {"mayor": "Bruno", "river": "Dovra", "twin": "Elam"}, an
        outdated edition is {"mayor": "Dovra", "river": "Elam", "twin": "Bruno"}.
    """
    relations, values = zip(*_wiki(task).facts[title].items(), strict=True)
    before = (nth - 1) // FRESH * (FRESH - 1) + (nth - 1) % FRESH - (nth > _surely_fresh(task, title, nth))
    shifts, others = _rearrangements(len(values))
    orders = (*_luck(task, title, "old").sample(shifts, len(shifts)), *others)
    order = orders[before % len(orders)]
    return Wiki({title: dict(zip(relations, (values[place] for place in order), strict=True))})


Order = tuple[int, ...]


@cache
def _rearrangements(count: int) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
    """Return the permutations of 0 .. ``count`` - 1 in which every number has moved to another place.

    The result is a pair: the permutations that are cyclic shifts, then the remaining permutations.

    Example:
        (((1, 2, 0), (2, 0, 1)), ()) for count = 3
    """
    shifts = tuple(tuple((place + by) % count for place in range(count)) for by in range(1, count))
    moved = (order for order in permutations(range(count)) if all(at != place for place, at in enumerate(order)))
    return shifts, tuple(order for order in moved if order not in shifts)


def build(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    """Build the task set. Raises InvalidInput if ``data`` or ``corpus`` is given."""
    refuse_files("unreliable", data, corpus)
    return TaskSet(
        name="unreliable",
        env=ToolEnv([search], max_turns=MAX_TURNS),
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"em": exact_match}),),
        rewards=("em",),
        recipe=RECIPE,
        evaluation=("reliable", "failing", "old-pages"),
        validation="validation",
        solutions=solutions,
    )


RECIPE: Mapping[str, Any] = {**TINY_BASE_RECIPE, "taskset": "unreliable", "context": 1024}


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
    """Return the reference solutions of a task.

    The right solution searches for each page until two searches have returned the true page, then answers.
    """
    chain: Chain = task.data["chain"]
    titles = (chain.start, *chain.values[:-1])
    searches = [tool_call("search", query=title) for title in titles for _ in range(_needed(task, title))]
    others = [value for value in _wiki(task).facts[titles[-1]].values() if value != chain.answer]
    return ReferenceSolutions(
        gold=(ReferenceSolution("what was read twice alike", script(*searches, _answer(chain.answer))),),
        wrong=(
            ReferenceSolution("another value of the page", script(*searches, _answer(others[0]))),
            ReferenceSolution("one page too early", script(searches[0], _answer(titles[-1]))),
            ReferenceSolution("searches to the end", script(*(searches[:1] * MAX_TURNS))),
        ),
        expected_rewards={"em": 1.0},
    )


def _needed(task: Task, title: str) -> int:
    """Return the number of searches that an agent needs until two searches have returned the true page.

    All searches are for the page with the title ``title``. The number can be above 2, because a search can fail or
    return an outdated edition of the page.
    """
    fresh = time = 0
    while fresh < 2:
        time += 1
        fresh += search_outcome(task, title, time) == "fresh"
    return time


def _answer(name: str) -> Message:
    return Message.assistant(f"<answer>{name}</answer>")


def _wiki(task: Task) -> Wiki:
    return open_wiki(task.data["wiki"])
