"""The facts of a corpus: the films, the directors of the films, and the texts of all pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.wikifilm.families import divide_families
from agent_r1.tasksets.wikifilm.films import Film, read_film
from agent_r1.tasksets.wikifilm.pages import shorten
from agent_r1.tasksets.wikifilm.persons import Person, read_director
from agent_r1.tasksets.wikifilm.words import as_spelled, name_key, title_name

AGES = (14, 100)
"""The minimum and the maximum age of a director in the year of a film.

A person with the director's name but with an age outside these limits is not the director of the film.
"""

YEARS_AFTER_DEATH = 3
"""The maximum number of years from a director's death to the release of the film.

A person with the director's name who died more than this number of years before the release is not the director of the
film.
"""


@dataclass(frozen=True, slots=True)
class DirectedFilm:
    """A film with its director. ``director`` is None if the director is not known or has no page."""

    film: Film
    director: Person | None


@dataclass(frozen=True, slots=True)
class FilmFacts:
    """The facts that were read from the pages of a corpus.

    Attributes:
        films: the films, in the order of the corpus.
        texts: the text of each page, cut as in a search result (:func:`shorten`), by title.
        classes: the split (train, validation or test) of each film and each director, by title.
    """

    films: tuple[DirectedFilm, ...]
    texts: Mapping[str, str]
    classes: Mapping[str, str]

    def answers(self, values: Sequence[str], title: str) -> tuple[str, ...]:
        """Return ``values``, and then the spellings of these values on one page (see :func:`as_spelled`).

        The argument ``title`` is the title of the page. Return () if the page contains none of the values.
        """
        spellings = [spelling for value in values if (spelling := as_spelled(value, self.texts[title]))]
        return tuple(dict.fromkeys((*values, *spellings))) if spellings else ()


def read_facts(pages: Iterable[Passage]) -> FilmFacts:
    """Read the facts of the pages. If several pages have the same title, only the first is used."""
    first: dict[str, Passage] = {}
    for page in pages:
        if page.title not in first:
            first[page.title] = shorten(page)
    films: list[Film] = []
    directors: dict[str, list[Person]] = {}
    for page in first.values():
        if film := read_film(page):
            films.append(film)
        elif person := read_director(page):
            directors.setdefault(name_key(title_name(page.title)), []).append(person)
    directed = tuple(DirectedFilm(film, _director(film, directors)) for film in films)
    classes = divide_families(map(_family, directed))
    return FilmFacts(
        films=directed,
        texts={title: page.text for title, page in first.items()},
        classes={title: classes[name_key(title)] for one in directed for title in _titles(one)},
    )


def _director(film: Film, directors: Mapping[str, list[Person]]) -> Person | None:
    """Return the director of a film; None if the director is not known.

    The director is known if the film's page names one director, exactly one person in ``directors`` has this name, and
    the film's year (if known) fits the person's life.
    """
    named = directors.get(name_key(film.director), []) if film.director else []
    return named[0] if len(named) == 1 and _can_have_made(film, named[0]) else None


def _can_have_made(film: Film, person: Person) -> bool:
    if film.year is None:
        return True
    old_enough = person.birth is None or AGES[0] <= film.year - person.birth.year <= AGES[1]
    return old_enough and (person.death is None or film.year - person.death.year <= YEARS_AFTER_DEATH)


def _titles(one: DirectedFilm) -> tuple[str, ...]:
    return (one.film.title, one.director.title) if one.director else (one.film.title,)


def _family(one: DirectedFilm) -> list[str]:
    """Return the names of a film's family (see :func:`divide_families`), each as a :func:`name_key`.

    The names are the title of the film's page, the title of the director's page, the director's name, and the name of
    the director's father.
    """
    person = one.director
    names = (*_titles(one), one.film.director, person.father if person else None)
    return [name_key(name) for name in names if name]
