"""The words of the task set ``people``: names, values of facts, and wordings of pages and questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
"""A relation to another person, the godparent. Only the split ``unseen-relation`` uses this relation."""

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
"""A relation to a value, the favorite dish. Only the split ``unseen-relation`` uses this relation."""
