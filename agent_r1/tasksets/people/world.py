"""Worlds of invented people: names, facts, pages, and chains of facts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.people.vocabulary import (
    HELD_OUT_PERSONAL,
    HELD_OUT_VALUED,
    MEN,
    PERSONAL,
    SURNAMES,
    VALUED,
    WOMEN,
    Relation,
)

_SUBJECT = re.compile(r"\{(?P<word>P|p2|p|O|o)\}")

PEOPLE = 40
PERSONAL_FACTS = (2, 3)
"""The minimum and the maximum number of personal facts on each page. A personal fact, such as the teacher, names
another person."""

VALUED_FACTS = (1, 3)
"""The minimum and the maximum number of valued facts on each page. A valued fact, such as the birthplace, names no
other person."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about a person, with the sentence on the person's page.

    Example:
        Fact(relation=.., value="Thomas Ashby", sentence="She was taught by Thomas Ashby.")
    """

    relation: Relation
    value: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of facts. The first fact is about ``start``; each later fact is about the value of the fact before.

    Fact ``i`` consists of relation ``i`` and value ``i``. The last value is the answer to the question.

    Example:
        Chain(start="Clara Hale", relations=(teacher, birthplace), values=("Adam Nash", "Lisbon"))
        means that Clara's teacher is Adam Nash, who was born in Lisbon.
    """

    start: str
    relations: tuple[Relation, ...]
    values: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.values[-1]

    @property
    def pages(self) -> tuple[str, ...]:
        """The titles of the pages with the facts, in the order of the facts."""
        return (self.start, *self.values[:-1])


@dataclass(frozen=True, slots=True)
class World:
    """A world of people. ``facts`` has the facts of each person, by the person's name."""

    facts: Mapping[str, tuple[Fact, ...]]

    def pages(self) -> tuple[Passage, ...]:
        return tuple(
            Passage(name, " ".join(fact.sentence for fact in facts)) for name, facts in sorted(self.facts.items())
        )

    def chain(self, hops: int, last: frozenset[str], rng: random.Random) -> Chain | None:
        """Draw a chain of ``hops`` facts in which no person occurs twice.

        ``last`` are the names of the relations with which the chain can end. Return None if the chain cannot be
        continued, because the last drawn person has no suitable fact. The caller can then draw again.
        """
        at = start = rng.choice(sorted(self.facts))
        relations, values, visited = [], [], {start}
        for hop in range(hops):
            is_last = hop == hops - 1
            fitting = [f for f in self.facts[at] if (f.relation.name in last if is_last else bool(f.relation.noun))]
            fitting = [fact for fact in fitting if fact.value not in visited]
            if not fitting:
                return None
            fact = rng.choice(fitting)
            relations.append(fact.relation)
            values.append(fact.value)
            at = fact.value
            visited.add(at)
        return Chain(start, tuple(relations), tuple(values))


@dataclass(frozen=True, slots=True)
class WorldKey:
    """The key from which a world is generated. Equal keys give equal worlds on every machine.

    Attributes:
        owner: "train", "validation" or "test". The people of the world get their surnames from ``SURNAMES[owner]``.
        number: a text, for example "0". Keys with different texts give different worlds.
        held_out_wordings: whether the pages use wordings that no page of training uses.
        held_out_relations: whether every page has facts of two relations that no page of training has.

    Example:
        WorldKey(owner="test", number="0")
    """

    owner: str
    number: str
    held_out_wordings: bool = False
    held_out_relations: bool = False


@lru_cache(maxsize=256)
def open_world(key: WorldKey) -> World:
    rng = random.Random(f"people/{key.owner}/{key.number}")
    names = _draw_names(key.owner, rng)
    facts = {}
    for name in names:
        personal = rng.sample(PERSONAL, rng.randint(*PERSONAL_FACTS))
        valued = rng.sample(VALUED, rng.randint(*VALUED_FACTS))
        if key.held_out_relations:
            personal[0], valued[0] = HELD_OUT_PERSONAL, HELD_OUT_VALUED
        others = iter(rng.sample([other for other in names if other != name], len(personal)))
        relations = [*personal, *valued]
        rng.shuffle(relations)
        values = {r.name: rng.choice(r.values) if r.values else next(others) for r in relations}
        facts[name] = tuple(
            Fact(r, values[r.name], _sentence(name, r, values[r.name], not index, key.held_out_wordings, rng))
            for index, r in enumerate(relations)
        )
    return World(facts)


def _draw_names(owner: str, rng: random.Random) -> list[str]:
    """Draw ``PEOPLE`` different full names, with surnames from the list ``SURNAMES[owner]``.

    Many people share a first name or a surname, so a search for one person also finds other people.
    """
    names: dict[str, None] = {}
    while len(names) < PEOPLE:
        names[f"{rng.choice(WOMEN + MEN)} {rng.choice(SURNAMES[owner])}"] = None
    return list(names)


def _sentence(name: str, relation: Relation, value: str, first: bool, held_out: bool, rng: random.Random) -> str:
    """Return the sentence that states a fact on a page.

    The first sentence of a page contains the name, other sentences a pronoun. ``held_out`` selects the wording that no
    page of training uses.
    """
    wording = relation.held_out_page if held_out else rng.choice(relation.pages)
    if first:
        wording = _SUBJECT.sub(lambda slot: f"{name}'s" if slot["word"] in "Oo" else name, wording, count=1)
    she, her, accusative = ("she", "her", "her") if name.split()[0] in WOMEN else ("he", "his", "him")
    article = "an" if value[0].lower() in "aeiou" else "a"
    return wording.format(P=she.capitalize(), O=her.capitalize(), p=she, o=her, p2=accusative, v=value, a=article)
