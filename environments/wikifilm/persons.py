"""Rules that read the facts of a director from the director's page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent_r1.retrieval.retriever import Passage
from environments.wikifilm.text import NATIONALITY, Date, find_dates, read_person, read_place, tidy, title_name

_IS = re.compile(r"\b(?:is|was) (?:(?:first )?an?|the|one of the) ")
_DIRECTS = re.compile(r"\b(?:directors?|film-?makers?|film makers?|directed)\b", re.IGNORECASE)
_RANGE = re.compile(r"[\u2013\u2014]|(?<=[\d ])-|-(?=[\d ])|^ ?$")
"""The text between the dates of birth and death: a dash or, in some passages, only a space or nothing."""

_UNCERTAIN = re.compile(r"\b(?:c|ca|circa|about|around|or|before|after|between|baptised|baptized|fl)\b|\?|/")
_BORN_AS = re.compile(r"(?:,? and (?:raised|grew up|brought up|educated)| as [A-Z][^,.;()]*?(?= in | on ))?")
"""Words that can stand between "born" and the date or the place. The pattern also matches the empty text."""

_WHEN = re.compile(r",? (?:on |in )?(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,? )?")
_WHERE = re.compile(r",? (?:at (?:his|her) home )?in (?:the )?")
_HIS_FATHER = re.compile(
    r"\b(?:[Hh]is|[Hh]er) father,?(?: was| is)? (?:(?:the|an?|late|film|noted|famous|well-known|actor|director|producer"
    r"|writer|poet|painter|composer|filmmaker|screenwriter|cinematographer|comedian|journalist|and) )*"
)
_CHILD_OF = re.compile(
    r"\b(?:is|was) (?:the|a) (?:[a-z]+ )?(?:son|daughter) of (?P<role>(?:[a-z/-]+,? )*)(?:Sir |Dr\. |Rev\. )?"
    r"(?=[^\W\d_a-z])"
)


@dataclass(frozen=True, slots=True)
class Person:
    """The facts of a person's page. A fact is None or () if the page does not state one clear value.

    Attributes:
        birthplace: the parts of the place of birth, the smallest part first, for example a town and its country.
        deathplace: like ``birthplace``.
    """

    title: str
    birth: Date | None
    birthplace: tuple[str, ...]
    death: Date | None
    deathplace: tuple[str, ...]
    nationality: str | None
    father: str | None


def read_director(page: Passage) -> Person | None:
    """Return the facts of a director's page; None if the page is not about a director."""
    text = tidy(page.text)
    verb = _IS.search(text)
    name = title_name(page.title)
    if verb is None or verb.start() > 300 or not name:
        return None
    if not _DIRECTS.search(text[verb.start() : verb.start() + 250]):
        return None
    birth, death = _read_life(text[: verb.start()])
    births = (birth, *_stated_events(text, name, "born"))
    deaths = (death, *_stated_events(text, name, "died"))
    return Person(
        title=page.title,
        birth=_agreed_date(births),
        birthplace=_agreed_place(births),
        death=_agreed_date(deaths),
        deathplace=_agreed_place(deaths),
        nationality=_nationality(text[verb.end() :]),
        father=_father(text, name),
    )


@dataclass(frozen=True, slots=True)
class _Event:
    """The date and the place of a birth or a death."""

    date: Date | None = None
    place: tuple[str, ...] = ()


def _read_life(life: str) -> tuple[_Event, _Event]:
    # ``life`` is the text between the name and "is a director", such as "(Madrid, 14 June 1894 - 1974)" or "(14 January
    # 1896 in Lviv - July 23, 1994)". An event that the text does not state is empty.
    pairs = [
        (one, other, dash)
        for one, other in pairwise(find_dates(life))
        if (dash := _RANGE.search(life[one.end : other.start]))
    ]
    if pairs:
        # In "(born Ann Lee (1886-1905); 3 May 1886 - 1962)" the first pair is the time of a name.
        one, _, dash = max(pairs, key=lambda pair: (pair[0].date.day > 0) + (pair[1].date.day > 0))
        return _read_event(life[: one.end + dash.start()], -1), _read_event(life[one.end + dash.end() :], 0)
    if re.search(r"\b(?:died|d\.)", life):
        return _Event(), _read_event(life, 0)
    return (_read_event(life, 0) if re.search(r"\b(?:born\b|b\.)", life) else _Event()), _Event()


def _read_event(text: str, which: int) -> _Event:
    # "14 January 1896 in Lviv" or "Lviv, 14 January 1896"; ``which`` of several dates: 0 the first, -1 the last
    dates = list(find_dates(text))
    if not dates:
        born_in = re.search(r"\bborn in ", text)
        return _Event(place=read_place(text[born_in.end() :])) if born_in else _Event()
    found = dates[which]
    if _UNCERTAIN.search(text[max(0, found.start - 10) : found.end + 5]):
        return _Event()
    after = re.match(r"(?:,| in| at) ", text[found.end :])
    place = read_place(text[found.end + after.end() :]) if after else ()
    before = re.search(r"[(;] ?([^(;]+), $", text[: found.start])
    if before and not place and "".join(read_place(before[1])) == before[1].replace(", ", ""):
        place = read_place(before[1])
    return _Event(found.date, place)


def _stated_events(text: str, name: str, verb: str) -> Iterator[_Event]:
    # For "born" and "Marin was born on 3 May 1918 in Rome, Italy, and died in Oslo.": 3 May 1918, ("Rome", "Italy")
    subject = rf"(?:^|[.;:] )(?:He|She|{re.escape(name)}|{re.escape(name.split()[-1])})"
    within = r"(?:[^.;]|\b[A-Z]\.){0,150}?"
    forms = {
        "born": rf"{subject} (?:was |is )?born\b|\. Born\b",
        "died": rf"{subject} died\b|{subject} was born\b{within},? and died\b",
    }
    surname = set(name.split())
    for match in re.finditer(forms[verb], text):
        rest = _BORN_AS.sub("", text[match.end() : match.end() + 160], count=1)
        date: Date | None = None
        place: tuple[str, ...] = ()
        for _ in range(2):  # the date and the place come in either order
            when, where = _WHEN.match(rest), _WHERE.match(rest)
            found = next(find_dates(rest), None)
            if when and found and found.start == when.end() and date is None:
                date, rest = found.date, rest[found.end :]
            elif where and not place:
                place = read_place(rest[where.end() :])
                rest = rest[where.end() + len(", ".join(place)) :]
        while place and set(place[-1].split()) <= surname:
            place = place[:-1]  # "Born in Rome, De Martino started ..": the last part is the subject of the sentence
        yield _Event(date, place)


def _agreed_date(events: Sequence[_Event]) -> Date | None:
    # the most exact date; None if two dates contradict each other
    dates = {event.date for event in events if event.date}
    if not dates:
        return None
    exact = max(dates, key=lambda date: (date.month > 0, date.day > 0))
    return exact if dates <= {exact, Date(exact.year, exact.month), Date(exact.year)} else None


def _agreed_place(events: Sequence[_Event]) -> tuple[str, ...]:
    # ("Rome", "Italy") for ("Rome",) and ("Rome", "Italy"); () for ("Italy",) and ("Rome", "Italy")
    places = [event.place for event in events if event.place]
    return max(places, key=len) if len({place[0] for place in places}) == 1 else ()


def _nationality(definition: str) -> str | None:
    # the only nationality in a text such as "prolific Danish film director"
    role = _DIRECTS.search(definition)
    found = NATIONALITY.findall(definition[: role.end()] if role else definition)
    leading = re.match(rf"(?:[a-z][\w-]*,? ){{0,4}}({NATIONALITY.pattern})(?![\w-])", definition)
    if leading is None or len(set(found)) != 1 or re.search(r"[Nn]aturali[sz]ed|citizen", definition):
        return None
    return leading[1]


def _father(text: str, name: str) -> str | None:
    # In "He was the son of X and Y", X is the father if X has the person's surname and Y another, and if X is not an
    # actress.
    surname = name.split()[-1]
    names = {read_person(text[match.end() :]) for match in _HIS_FATHER.finditer(text)}
    for match in _CHILD_OF.finditer(text):
        parent = read_person(text[match.end() :])
        subject = text[: match.start()].rpartition(". ")[2].strip()
        other = re.match(r",? and (?:(?!nephew|niece|brother|sister|grand)[a-z]+ )*", text[match.end() + len(parent) :])
        second = read_person(text[match.end() + len(parent) + other.end() :]) if other else ""
        is_alone = parent.split()[-1:] == [surname] != second.split()[-1:]
        if is_alone and subject in ("He", "She", name, surname) and "actress" not in match["role"]:
            names.add(parent)
    full = [one for one in names if " " in one]
    return full[0] if len(full) == 1 else None
