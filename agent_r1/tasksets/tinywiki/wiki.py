"""Wikis: generated encyclopedias with one page per entity, chains of facts through the pages, and the search tool."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from agent_r1.core.messages import Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.tools.function_tool import tool

_STARTS = (
    "Al",
    "Br",
    "Cor",
    "Dov",
    "El",
    "Fen",
    "Gar",
    "Hil",
    "Jor",
    "Kest",
    "Lum",
    "Mer",
    "Nor",
    "Ost",
    "Per",
    "Quil",
)
_MIDDLES = ("a", "e", "i", "o", "u")
_ENDS = ("ban", "dra", "mis")

ENTITIES: tuple[str, ...] = tuple("".join(parts) for parts in product(_STARTS, _MIDDLES, _ENDS))
RELATIONS: tuple[str, ...] = (
    *("bridge", "capital", "founder", "harbour", "mayor", "neighbour"),
    *("painter", "river", "rival", "teacher", "temple", "twin"),
)
UNSEEN_RELATION = "market"
"""A new name for the relation ``REPLACED_RELATION`` in some test wikis. This word occurs in no training text."""

REPLACED_RELATION = "temple"

CLASSES: Mapping[str, int] = {"train": 0, "validation": 1, "test": 2}
"""The indices of the three classes of facts. Each possible fact belongs to one class (see :func:`fact_class`).

A wiki contains only facts of one class, so wikis of different classes share no fact.
"""

UNSEEN = "unseen"
"""A class of wikis: test wikis in which ``REPLACED_RELATION`` is called ``UNSEEN_RELATION``."""

PAGES = 60
FACTS_PER_PAGE = 5

_POSITION = {word: position for words in (ENTITIES, RELATIONS) for position, word in enumerate(words)}


def fact_class(entity: str, relation: str, value: str) -> int:
    """Return the index of the class of a fact: 0 for train, 1 for validation, 2 for test."""
    return (_POSITION[entity] + _POSITION[relation] + _POSITION[value]) % len(CLASSES)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of facts. The first fact is about ``start``; each later fact is about the value of the fact before.

    Fact ``i`` consists of relation ``i`` and value ``i``. The last value is the answer to the question.

    Example:
        Chain(start="Alba", relations=("mayor", "twin"), values=("Bruno", "Corin"))
        means that Bruno is the mayor of Alba, and Corin is the twin of Bruno.
    """

    start: str
    relations: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.values[-1]

    @property
    def pages(self) -> tuple[str, ...]:
        """The titles of the pages with the facts, in the order of the facts."""
        return (self.start, *self.values[:-1])


@dataclass(frozen=True, slots=True)
class Wiki:
    """The facts of an encyclopedia, by entity and relation. Every value is an entity with its own page.

    Example:
        Wiki({"Alba": {"mayor": "Bruno"}, "Bruno": {"twin": "Alba"}})
    """

    facts: Mapping[str, Mapping[str, str]]

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(self.facts)

    def page(self, title: str) -> str:
        """Return the text of a page, for example ``Alba: mayor Bruno. river Dovra.``"""
        return f"{title}: " + " ".join(f"{relation} {value}." for relation, value in self.facts[title].items())

    def renamed(self, relation: str, name: str) -> Wiki:
        return Wiki(
            {
                title: {name if known == relation else known: v for known, v in facts.items()}
                for title, facts in self.facts.items()
            }
        )

    def chain(self, hops: int, rng: random.Random) -> Chain:
        """Draw a chain of ``hops`` facts in which no entity and no relation occurs twice."""
        while True:
            at = start = rng.choice(self.titles)
            relations, values = [], []
            for _ in range(hops):
                relation, at = rng.choice(tuple(self.facts[at].items()))
                relations.append(relation)
                values.append(at)
            if len({start, *values}) == hops + 1 and len(set(relations)) == hops:
                return Chain(start, tuple(relations), tuple(values))


@lru_cache(maxsize=256)
def open_wiki(name: str) -> Wiki:
    """Return the wiki with a name such as "test/0". Equal names give equal wikis on every machine.

    The part before the first slash is the class of the wiki: a key of ``CLASSES``, or ``UNSEEN``.
    """
    owner, _, rest = name.partition("/")
    if owner == UNSEEN:
        return open_wiki(f"test/{rest}").renamed(REPLACED_RELATION, UNSEEN_RELATION)
    return draw(CLASSES[owner], random.Random(name))


def draw(owner: int, rng: random.Random) -> Wiki:
    """Draw a wiki with facts of only one class, a value of ``CLASSES``."""
    titles = rng.sample(ENTITIES, PAGES)
    return Wiki({title: _facts(title, titles, owner, rng) for title in titles})


def _facts(title: str, titles: Sequence[str], owner: int, rng: random.Random) -> dict[str, str]:
    facts: dict[str, str] = {}
    for relation in rng.sample(RELATIONS, FACTS_PER_PAGE):
        # No two values of a page are equal: a page that is read answers exactly one relation with each name.
        fitting = [value for value in titles if fact_class(title, relation, value) == owner]
        facts[relation] = rng.choice([value for value in fitting if value != title and value not in facts.values()])
    return facts


# The search tool: a search returns at most one page

NOTHING = "No page."


def first_title(wiki: Wiki, query: str) -> str | None:
    return next((word for word in re.findall(r"\w+", query) if word in wiki.facts), None)


def retrieve(wiki: Wiki, query: str) -> str:
    """Return the text of the page of the first title in the query; ``NOTHING`` if there is no title.

    Example:
        retrieve(wiki, "mayor of Alba or Bruno") == wiki.page("Alba")
    """
    title = first_title(wiki, query)
    return NOTHING if title is None else wiki.page(title)


@tool
async def search(query: str, task: Task) -> str:
    """Find a page.

    Args:
        query: what to find
    """
    return retrieve(open_wiki(task.data["wiki"]), query)


def found_page(call: ToolCall, result: ToolResult) -> Mapping[str, float]:
    """Return the process reward ``found``: 1.0 if the search returned a page, else 0.0."""
    return {"found": float(result.ok and result.parts != (Text(NOTHING),))}
