"""Wikis: generated encyclopedias with one page per entity, and chains of facts through the pages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.tasksets.tinywiki.names import ENTITIES, RELATIONS, REPLACED_RELATION, UNSEEN_RELATION

CLASSES: Mapping[str, int] = {"train": 0, "validation": 1, "test": 2}
"""The indices of the three classes of facts. Each possible fact belongs to one class (see :func:`fact_class`).

A wiki contains only facts of one class, so wikis of different classes share no fact.
"""

_POSITION = {word: position for words in (ENTITIES, RELATIONS) for position, word in enumerate(words)}

UNSEEN = "unseen"
"""A class of wikis: test wikis in which the relation "temple" is called "market", a word that training never uses."""

PAGES = 60
FACTS_PER_PAGE = 5


def fact_class(entity: str, relation: str, value: str) -> int:
    """Return the index of the class of a fact: 0 for train, 1 for validation, 2 for test.

    The index is the sum of the three words' positions in their vocabularies, modulo 3.
    """
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
            walk = self._walk(hops, rng)
            if len({walk.start, *walk.values}) == hops + 1 and len(set(walk.relations)) == hops:
                return walk

    def _walk(self, hops: int, rng: random.Random) -> Chain:
        at = start = rng.choice(self.titles)
        relations, values = [], []
        for _ in range(hops):
            relation, at = rng.choice(tuple(self.facts[at].items()))
            relations.append(relation)
            values.append(at)
        return Chain(start, tuple(relations), tuple(values))


@lru_cache(maxsize=256)
def open_wiki(name: str) -> Wiki:
    """Return the wiki with a name such as "test/0". Equal names give equal wikis on every machine.

    The part before the first slash is the class of the wiki: "train", "validation", "test" or "unseen" (``UNSEEN``).
    """
    owner, _, rest = name.partition("/")
    if owner == UNSEEN:
        return open_wiki(f"test/{rest}").renamed(REPLACED_RELATION, UNSEEN_RELATION)
    return draw(CLASSES[owner], random.Random(name))


def draw(owner: int, rng: random.Random) -> Wiki:
    """Draw a wiki with facts of only one class.

    ``owner`` is the index of the class: 0 for train, 1 for validation, 2 for test.
    """
    titles = rng.sample(ENTITIES, PAGES)
    return Wiki({title: _facts(title, titles, owner, rng) for title in titles})


def _facts(title: str, titles: Sequence[str], owner: int, rng: random.Random) -> dict[str, str]:
    """Draw the facts of the page ``title``: a mapping from relations to values, such as {"mayor": "Bruno"}.

    The values are titles of other pages, drawn from ``titles``. No two values are equal. For each fact,
    :func:`fact_class` is ``owner``: 0 for train, 1 for validation, 2 for test.
    """
    facts: dict[str, str] = {}
    for relation in rng.sample(RELATIONS, FACTS_PER_PAGE):
        fitting = [value for value in titles if fact_class(title, relation, value) == owner]
        facts[relation] = rng.choice([value for value in fitting if value != title and value not in facts.values()])
    return facts
