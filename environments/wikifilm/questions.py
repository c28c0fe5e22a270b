"""Questions about films and their directors, in the wordings of 2WikiMultihopQA."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.tasksets.multihop.questions import Question
from environments.wikifilm.films import SHARES, DirectedFilm, FilmFacts
from environments.wikifilm.persons import Person
from environments.wikifilm.text import COUNTRIES, Date, country, name_key, title_name

PARTNERS = 12
"""The maximum number of films that are tried as the second film of a question. The first suitable film is used."""

YEARS_APART = 2
"""The minimum difference of the two years that a question compares. A film can have several release dates."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A way to compare two films by a year, with several wordings of the question.

    In a wording, ``{a}`` and ``{b}`` stand for the titles of the two films.

    Attributes:
        first: wordings of questions whose answer is the film with the earlier year.
        last: wordings of questions whose answer is the film with the later year.
        year: returns the compared year of a film; None if the pages do not state the year.
        reads_directors: whether the years are on the pages of the directors, and not on the pages of the films.
    """

    name: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    year: Callable[[DirectedFilm], int | None]
    reads_directors: bool = True


COMPARISONS = (
    Comparison(
        "release",
        first=(
            "Which film came out first, {a} or {b}?",
            "Which film came out earlier, {a} or {b}?",
            "Which film was released first, {a} or {b}?",
            "Which film was released earlier, {a} or {b}?",
        ),
        last=("Which film was released more recently, {a} or {b}?", "Which film came out later, {a} or {b}?"),
        year=lambda one: one.film.year,
        reads_directors=False,
    ),
    Comparison(
        "director-birth",
        first=(
            "Which film has the director who was born first, {a} or {b}?",
            "Which film has the director who is older, {a} or {b}?",
            "Which film has the director born earlier, {a} or {b}?",
        ),
        last=(
            "Which film has the director who was born later, {a} or {b}?",
            "Which film whose director is younger, {a} or {b}?",
        ),
        year=lambda one: one.director.birth.year if one.director and one.director.birth else None,
    ),
    Comparison(
        "director-death",
        first=(
            "Which film has the director who died first, {a} or {b}?",
            "Which film has the director who died earlier, {a} or {b}?",
        ),
        last=("Which film has the director who died later, {a} or {b}?",),
        year=lambda one: one.director.death.year if one.director and one.director.death else None,
    ),
)

SAME_COUNTRY = (
    "Are director of film {a} and director of film {b} both from the same country?",
    "Are both directors of films {a} and {b} from the same country?",
)


def _comparison(
    id: str,
    text: str,
    films: tuple[DirectedFilm, DirectedFilm],
    answers: tuple[str, ...],
    found: tuple[str, str],
    reads_directors: bool,
) -> Question:
    # ``found`` are the facts that the agent must find, two years or two nationalities, such as ("1953", "1961").
    directors = [one.director.title for one in films if one.director] if reads_directors else []
    titles = [one.film.title for one in films]
    text = text.format(a=titles[0], b=titles[1])
    return Question(id, text, answers, (*titles, *directors), (), (*directors, *found, answers[0]))


def compare_films(films: Sequence[DirectedFilm]) -> Iterator[Question]:
    """Yield the questions that compare two of ``films``, by their years or by their directors' countries.

    In each kind of comparison, a film is named first in at most one question.
    """
    for comparison in COMPARISONS:
        yield from _by_year(films, comparison)
    yield from _by_country(films)


def _by_year(films: Sequence[DirectedFilm], comparison: Comparison) -> Iterator[Question]:
    years = {one.film.title: year for one in films if (year := comparison.year(one)) is not None}
    ordered = _hash_order([one for one in films if one.film.title in years], comparison.name)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 : index + 1 + PARTNERS]:
            early, late = sorted((one, other), key=lambda film: years[film.film.title])
            if years[late.film.title] - years[early.film.title] < YEARS_APART or not _distinct(one, other):
                continue
            kind = "bridge-comparison" if comparison.reads_directors else "comparison"
            id = f"{kind}/{comparison.name}/{one.film.title}/{other.film.title}"
            text, answer = random.Random(id).choice(
                [(text, early) for text in comparison.first] + [(text, late) for text in comparison.last]
            )
            found = (str(years[one.film.title]), str(years[other.film.title]))
            title = answer.film.title
            answers = tuple(dict.fromkeys((title, title_name(title))))
            yield _comparison(id, text, (one, other), answers, found, comparison.reads_directors)
            break


def _by_country(films: Sequence[DirectedFilm]) -> Iterator[Question]:
    nations = {
        one.film.title: nation for one in films if one.director and (nation := one.director.nationality) is not None
    }
    known = [one for one in films if one.film.title in nations and country(nations[one.film.title])]
    ordered = _hash_order(known, "country")
    counts = {"yes": 0, "no": 0}
    for index, one in enumerate(ordered):
        # alternate, so that about half of the answers are "yes"
        wanted = min(counts, key=lambda answer: counts[answer])
        for other in ordered[index + 1 : index + 1 + PARTNERS]:
            pair = (nations[one.film.title], nations[other.film.title])
            # A director who is English and one who is British may or may not be from the same country.
            same = "yes" if pair[0] == pair[1] else "no" if country(pair[0]) != country(pair[1]) else None
            if same == wanted and _distinct(one, other):
                id = f"bridge-comparison/country/{one.film.title}/{other.film.title}"
                text = random.Random(id).choice(SAME_COUNTRY)
                yield _comparison(id, text, (one, other), (wanted,), pair, reads_directors=True)
                counts[wanted] += 1
                break


def _distinct(one: DirectedFilm, other: DirectedFilm) -> bool:
    if name_key(title_name(one.film.title)) == name_key(title_name(other.film.title)):
        return False
    return one.director is None or other.director is None or one.director.title != other.director.title


def _hash_order(films: Sequence[DirectedFilm], salt: str) -> list[DirectedFilm]:
    return sorted(films, key=lambda one: hashlib.sha256(f"{salt}|{one.film.title}".encode()).digest())


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact that can be asked about a person, such as the birthplace.

    Attributes:
        wordings: wordings of the question. The person's name or "the director of film .." replaces ``{x}``.
        answers: returns the right answers for a person; () if the person's page does not state the fact.
    """

    name: str
    wordings: tuple[str, ...]
    answers: Callable[[Person], tuple[str, ...]]

    def ask(self, who: str, id: str) -> str:
        """Return a question about ``who``: a name, or "the director of film ..". ``id`` determines the wording."""
        return random.Random(id).choice(self.wordings).format(x=who)


def _date(date: Date | None) -> tuple[str, ...]:
    return date.written() if date else ()


def _place(parts: Sequence[str]) -> tuple[str, ...]:
    # ("Visby", "Visby, Sweden") for ("Visby", "Sweden")
    return tuple(", ".join(parts[:end]) for end in range(1, len(parts) + 1))


def _nationality(nationality: str | None) -> tuple[str, ...]:
    return (nationality, *COUNTRIES[nationality]) if nationality else ()


RELATIONS = (
    Relation(
        "birth-date", ("When was {x} born?", "What is the date of birth of {x}?"), lambda person: _date(person.birth)
    ),
    Relation(
        "birthplace",
        ("Where was {x} born?", "What is the place of birth of {x}?"),
        lambda person: _place(person.birthplace),
    ),
    Relation("death-date", ("When did {x} die?", "What is the date of death of {x}?"), lambda p: _date(p.death)),
    Relation(
        "deathplace",
        ("Where did {x} die?", "What is the place of death of {x}?", "Where was the place of death of {x}?"),
        lambda person: _place(person.deathplace),
    ),
    Relation(
        "nationality",
        ("What nationality is {x}?", "Which country {x} is from?"),
        lambda person: _nationality(person.nationality),
    ),
    Relation("father", ("Who is the father of {x}?",), lambda person: (person.father,) if person.father else ()),
)


def build_questions(facts: FilmFacts) -> Mapping[str, tuple[Question, ...]]:
    """Return the questions by split (train, validation or test). The films of a question decide its split."""
    questions = {}
    for owner in SHARES:
        films = [one for one in facts.films if facts.classes[one.film.title] == owner]
        questions[owner] = (*_about_directors(films, facts), *compare_films(films))
    return questions


def _about_directors(films: Sequence[DirectedFilm], facts: FilmFacts) -> Iterator[Question]:
    # A 1-hop question asks who directed a film, or for a fact about a director; a 2-hop question asks for a fact about
    # "the director of film ..".
    asked: set[str] = set()
    for one in films:
        title = one.film.title
        names = facts.answers((one.film.director,), title) if one.film.director else ()
        if not names:
            continue
        text = f"Who is the director of film {title}?"
        yield Question(f"1-hop/director/{title}", text, names, (title,), (), names[:1])
        if one.director is None:
            continue
        page = one.director.title
        for relation in RELATIONS:
            if not (answers := facts.answers(relation.answers(one.director), page)):
                continue
            if page not in asked:
                id = f"1-hop/{relation.name}/{page}"
                yield Question(id, relation.ask(page, id), answers, (page,), (), answers[:1])
            id = f"2-hop/{relation.name}/{title}"
            text = relation.ask(f"the director of film {title}", id)
            yield Question(id, text, answers, (title, page), (), (names[0], answers[0]))
        asked.add(page)
