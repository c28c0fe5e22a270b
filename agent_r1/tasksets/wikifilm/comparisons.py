"""Questions that compare two films, by their years or by their directors, in the wordings of 2WikiMultihopQA."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agent_r1.tasksets.multihop.questions import Question
from agent_r1.tasksets.wikifilm.countries import country
from agent_r1.tasksets.wikifilm.facts import DirectedFilm
from agent_r1.tasksets.wikifilm.words import name_key, title_name

PARTNERS = 12
"""The maximum number of films that are tried as the second film of a question. The first suitable film is used."""

YEARS_APART = 2
"""The minimum difference, in years, of the two years that a question compares.

A smaller difference is not certain, because a film can have several release dates.
"""


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


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two films that a question compares. In the question, the film in the field ``one`` comes first.

    ``reads_directors`` is True if the facts for the answer are on the pages of the directors.
    """

    one: DirectedFilm
    other: DirectedFilm
    reads_directors: bool

    def question(self, id: str, text: str, answers: tuple[str, ...], found: tuple[str, str]) -> Question:
        """Return a question about the two films.

        ``text`` is a wording: the titles of the films replace ``{a}`` and ``{b}``. ``found`` are the facts that
        the agent must find, two years or two nationalities, such as ("1953", "1961").
        """
        films = (self.one, self.other)
        directors = [one.director.title for one in films if one.director] if self.reads_directors else []
        text = text.format(a=self.one.film.title, b=self.other.film.title)
        supporting = (*(one.film.title for one in films), *directors)
        return Question(id, text, answers, supporting, (), (*directors, *found, answers[0]))


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
            yield _Pair(one, other, comparison.reads_directors).question(id, text, _film_answers(answer), found)
            break


def _by_country(films: Sequence[DirectedFilm]) -> Iterator[Question]:
    """Yield questions that ask whether two directors are from the same country.

    About half of the answers are "yes".
    """
    nations = {
        one.film.title: nation for one in films if one.director and (nation := one.director.nationality) is not None
    }
    known = [one for one in films if one.film.title in nations and country(nations[one.film.title])]
    ordered = _hash_order(known, "country")
    counts = {"yes": 0, "no": 0}
    for index, one in enumerate(ordered):
        wanted = min(counts, key=lambda answer: counts[answer])
        for other in ordered[index + 1 : index + 1 + PARTNERS]:
            pair = (nations[one.film.title], nations[other.film.title])
            # A director who is English and one who is British may or may not be from the same country.
            same = "yes" if pair[0] == pair[1] else "no" if country(pair[0]) != country(pair[1]) else None
            if same == wanted and _distinct(one, other):
                id = f"bridge-comparison/country/{one.film.title}/{other.film.title}"
                text = random.Random(id).choice(SAME_COUNTRY)
                yield _Pair(one, other, reads_directors=True).question(id, text, (wanted,), pair)
                counts[wanted] += 1
                break


def _film_answers(one: DirectedFilm) -> tuple[str, ...]:
    return tuple(dict.fromkeys((one.film.title, title_name(one.film.title))))


def _distinct(one: DirectedFilm, other: DirectedFilm) -> bool:
    if name_key(title_name(one.film.title)) == name_key(title_name(other.film.title)):
        return False
    return one.director is None or other.director is None or one.director.title != other.director.title


def _hash_order(films: Sequence[DirectedFilm], salt: str) -> list[DirectedFilm]:
    return sorted(films, key=lambda one: hashlib.sha256(f"{salt}|{one.film.title}".encode()).digest())
