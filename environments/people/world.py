"""Worlds of invented people: names, facts, pages, and chains of facts."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.retrieval.retriever import Passage


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN: tuple[str, ...] = _words(
    "Agnes Alice Beatrice Clara Diana Edith Eleanor Emma Florence Grace Hannah Helen Irene Jane Julia Laura Lucy "
    "Margaret Martha Miriam Nora Olivia Rachel Ruth Sarah Sylvia Teresa Vera Violet Wendy"
)
MEN: tuple[str, ...] = _words(
    "Adam Albert Andrew Arthur Benjamin Charles Daniel David Edward Felix Frank George Harold Henry Hugo Isaac Jacob "
    "James Leonard Louis Martin Nathan Oliver Oscar Peter Philip Robert Samuel Thomas Victor"
)

SURNAMES: Mapping[str, tuple[str, ...]] = {
    "train": _words(
        "Abbott Archer Atwood Barlow Baxter Bishop Bradley Brooks Calloway Carver Chandler Clayton Cooper Crawford "
        "Dalton Dawson Draper Ellison Fairbanks Fletcher Foster Gardner Gibson Goodwin Granger Hale Hammond Harper "
        "Hawkins Holloway Hudson Ingram Jennings Keller Kendall Lambert Langley Lawson Marlowe Mercer"
    ),
    "validation": _words(
        "Mitchell Monroe Morton Nash Newell Norris Osborne Palmer Parker Pearson Perkins Porter Quincy Ramsey "
        "Reynolds Rhodes Sawyer Sheldon Sinclair Spencer"
    ),
    "test": _words(
        "Stafford Stanton Sutton Talbot Tanner Thornton Tucker Turner Vance Vaughan Wakefield Walden Wallace Warren "
        "Weaver Webster Wheeler Whitfield Winslow Yates"
    ),
}
"""The surnames in training, validation and test. No surname is in two lists, so the splits share no person."""

CITIES = _words(
    "Amsterdam Athens Barcelona Berlin Boston Bristol Budapest Cairo Chicago Copenhagen Dublin Edinburgh Florence "
    "Geneva Glasgow Hamburg Helsinki Istanbul Leeds Lisbon London Lyon Madrid Melbourne Milan Montreal Munich Naples "
    "Oslo Oxford Paris Prague Rome Seattle Stockholm Sydney Toronto Venice Vienna Warsaw"
)
PROFESSIONS = _words(
    "actor architect astronomer baker banker botanist carpenter chemist composer dentist editor engineer farmer "
    "geologist historian judge lawyer librarian nurse painter pharmacist photographer pilot poet sculptor surgeon "
    "tailor translator"
)
INSTRUMENTS = _words(
    "accordion banjo cello clarinet drums flute guitar harp mandolin oboe organ piano trumpet viola violin"
)
LANGUAGES = _words(
    "Arabic Czech Danish Dutch Finnish French German Greek Hungarian Italian Japanese Latin Norwegian Polish "
    "Portuguese Russian Spanish Swedish Turkish Welsh"
)
ANIMALS = _words("canary cat donkey falcon goat goose hamster horse parrot peacock pony rabbit sheep spaniel tortoise")
DISHES = _words("dumplings lasagna moussaka omelette paella pancakes porridge ramen risotto stew tacos trifle")


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation of a person to another person (a teacher) or to a value (a city of birth), with its wordings.

    Placeholders in the wordings of pages:

    - {P}, {p} and {p2} stand for "She", "she" and "her", or for "He", "he" and "him".
    - {O} and {o} stand for "Her" and "her", or for "His" and "his".
    - {v} stands for the name of the other person or for the value, and {a} for "a" or "an" in front of the value.

    In the first sentence of a page, the name of the person replaces the first pronoun.

    Attributes:
        pages: wordings of a fact on a page.
        questions: wordings of a question that asks for the other person or the value; ``{x}`` stands for the person.
        noun: the word for the other person, such as "teacher", if the relation is to a person; else "".
        values: the possible values; () if the relation is to a person.
        held_out_page: a wording that no page of training uses.
        held_out_question: a wording that no question of training uses.
    """

    name: str
    pages: tuple[str, ...]
    questions: tuple[str, ...]
    held_out_page: str
    held_out_question: str
    noun: str = ""
    values: tuple[str, ...] = ()


def _person(noun: str, *pages: str, held_out_page: str) -> Relation:
    questions = (f"Who was the {noun} of {{x}}?", f"Give the name of the {noun} of {{x}}.")
    return Relation(noun, pages, questions, held_out_page, f"Name the person who was the {noun} of {{x}}.", noun)


PERSONAL: tuple[Relation, ...] = (
    _person(
        "teacher",
        "{P} was taught by {v}.",
        "{O} teacher was {v}.",
        "As a student, {p} had {v} as a teacher.",
        held_out_page="The teacher who shaped {o} youth was {v}.",
    ),
    _person(
        "employer",
        "{O} employer was {v}.",
        "{P} had an employer named {v}.",
        "For years {p} was in the service of {v}, a strict employer.",
        held_out_page="The wages came from {v}, {o} employer.",
    ),
    _person(
        "rival",
        "{O} great rival was {v}.",
        "{P} had a rival, {v}.",
        "All {o} life {p} saw {v} as a rival.",
        held_out_page="Newspapers liked to call {v} {o} rival.",
    ),
    _person(
        "biographer",
        "{O} biographer was {v}.",
        "{P} had a biographer, {v}.",
        "{v} became {o} biographer.",
        held_out_page="The book about {o} life is by {v}, a patient biographer.",
    ),
    _person(
        "best friend",
        "{O} best friend was {v}.",
        "{P} had a best friend, {v}.",
        "{P} went everywhere with {v}, {o} best friend.",
        held_out_page="Since school {v} had been {o} best friend.",
    ),
)
"""Relations to another person. No relation is symmetric. A person has at most one value of each relation."""

HELD_OUT_PERSONAL = _person(
    "godparent",
    "{O} godparent was {v}.",
    "{P} had {v} as a godparent.",
    held_out_page="The godparent chosen for {p2} was {v}.",
)
"""A relation to another person that only the split ``unseen-relation`` uses."""

VALUED: tuple[Relation, ...] = (
    Relation(
        "birthplace",
        ("{P} was born in {v}.", "{P} came from {v}, where {p} was born.", "{O} place of birth was {v}."),
        ("In which city was {x} born?", "Where was {x} born?"),
        "{O} life began in {v}, the city of {o} birth.",
        "What is the birthplace of {x}?",
        values=CITIES,
    ),
    Relation(
        "profession",
        ("{P} worked as {a} {v}.", "{P} was {a} {v} by profession.", "{O} profession was that of {a} {v}."),
        ("What was the profession of {x}?", "What did {x} work as?"),
        "To earn a living {p} became {a} {v}, a profession {p} loved.",
        "Which profession did {x} have?",
        values=PROFESSIONS,
    ),
    Relation(
        "instrument",
        ("{P} played the {v}.", "{O} favorite instrument was the {v}.", "{P} owned an old instrument, the {v}."),
        ("Which instrument did {x} play?", "What instrument was played by {x}?"),
        "On Sundays {p} practiced the {v}, the only instrument in the house.",
        "Name the instrument of {x}.",
        values=INSTRUMENTS,
    ),
    Relation(
        "language",
        ("{P} spoke {v}.", "At home {p} spoke {v}.", "{O} first language was {v}."),
        ("Which language did {x} speak?", "What language was spoken by {x}?"),
        "The language {p} wrote letters in was {v}.",
        "Name the language of {x}.",
        values=LANGUAGES,
    ),
    Relation(
        "animal",
        ("{P} kept a {v}.", "{O} favorite animal was a {v}.", "{P} owned an animal, a {v}."),
        ("Which animal did {x} keep?", "What animal did {x} own?"),
        "The animal that followed {p2} everywhere was a {v}.",
        "Name the animal of {x}.",
        values=ANIMALS,
    ),
)
"""Relations of a person to a value, such as a city of birth."""

HELD_OUT_VALUED = Relation(
    "dish",
    ("{O} favorite dish was {v}.", "{P} liked to cook a dish, {v}."),
    ("What was the favorite dish of {x}?", "Which dish did {x} like?"),
    "Of all dishes, {p} praised {v} most.",
    "Name the dish of {x}.",
    values=DISHES,
)
"""A relation to a value that only the split ``unseen-relation`` uses."""


_SUBJECT = re.compile(r"\{(?P<word>P|p2|p|O|o)\}")

PEOPLE = 40
PERSONAL_FACTS = (2, 3)
"""The minimum and the maximum number of personal facts, such as the teacher, on each page."""

VALUED_FACTS = (1, 3)
"""The minimum and the maximum number of valued facts, such as the birthplace, on each page."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about a person, with the sentence on the person's page: "She was taught by Thomas Ashby."."""

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
        """Draw a chain of ``hops`` facts in which no person occurs twice, and whose last relation is in ``last``.

        Return None if the last drawn person has no suitable fact. The caller can then draw again.
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
    # Many people share a first name or a surname, so a search for one person also finds other people.
    names: dict[str, None] = {}
    while len(names) < PEOPLE:
        names[f"{rng.choice(WOMEN + MEN)} {rng.choice(SURNAMES[owner])}"] = None
    return list(names)


def _sentence(name: str, relation: Relation, value: str, first: bool, held_out: bool, rng: random.Random) -> str:
    # The first sentence of a page contains the name, other sentences a pronoun.
    wording = relation.held_out_page if held_out else rng.choice(relation.pages)
    if first:
        wording = _SUBJECT.sub(lambda slot: f"{name}'s" if slot["word"] in "Oo" else name, wording, count=1)
    she, her, accusative = ("she", "her", "her") if name.split()[0] in WOMEN else ("he", "his", "him")
    article = "an" if value[0].lower() in "aeiou" else "a"
    return wording.format(P=she.capitalize(), O=her.capitalize(), p=she, o=her, p2=accusative, v=value, a=article)
