"""Questions about films and their directors, in the wordings of 2WikiMultihopQA."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.tasksets.multihop.questions import Question
from agent_r1.tasksets.wikifilm.comparisons import compare_films
from agent_r1.tasksets.wikifilm.countries import COUNTRIES
from agent_r1.tasksets.wikifilm.dates import Date
from agent_r1.tasksets.wikifilm.facts import DirectedFilm, FilmFacts
from agent_r1.tasksets.wikifilm.families import SHARES
from agent_r1.tasksets.wikifilm.persons import Person


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact that can be asked about a person, such as the birthplace.

    Attributes:
        wordings: wordings of the question. The person's name or "the director of film .." replaces ``{x}``.
        answers: returns the right answers for a person; () if the person's page does not state the fact.

    Example:
        Relation(name="birthplace", wordings=("Where was {x} born?",), answers=lambda person: ..)
    """

    name: str
    wordings: tuple[str, ...]
    answers: Callable[[Person], tuple[str, ...]]

    def ask(self, who: str, id: str) -> str:
        """Return a question about a person. The id of the question determines the wording.

        ``who`` is the name of the person, or a text such as "the director of film .."
        """
        return random.Random(id).choice(self.wordings).format(x=who)


def _date(date: Date | None) -> tuple[str, ...]:
    return date.written() if date else ()


def _place(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the right answers for a place: ("Visby", "Visby, Sweden") for ("Visby", "Sweden")."""
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
    """Yield questions about the directors of ``films``.

    A 1-hop question asks who directed a film, or for a fact about a director. A 2-hop question asks for a fact about
    "the director of film ..".
    """
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
