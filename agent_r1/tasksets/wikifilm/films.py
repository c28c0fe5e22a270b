"""Rules that read the director and the year of a film from its page."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.wikifilm.countries import NATIONALITY
from agent_r1.tasksets.wikifilm.words import name_key, read_person, tidy

# Patterns of the first sentence, "X is a 1953 German comedy film directed by Y and starring Z."
_IS = re.compile(r"\b(?:is|was) (?:an?|the) ")
_YEAR = re.compile(r"\b(?:1[89]|20)\d\d\b(?![-\u2013\u2014/]\d)")
_GENRES = "film|movie|western|comedy|documentary|thriller|drama|musical|short"
_KIND = re.compile(rf"\b(?:{_GENRES})\b(?! (?:director|actor|actress|producer|festival|series|serial|studio|company))")
# "is a 1953 film series", "is the soundtrack of the film": the page is not about a film.
_OTHER_KIND = re.compile(
    r"\b(?:series|serial|miniseries|soundtrack|album|novel|novella|song|single|game|play|opera|book|festival|episode"
    r"|character|role|anthology|trilogy|franchise)\b",
    re.IGNORECASE,
)
# "directed by", "directed and produced by", "co-directed by"
_DIRECTED = re.compile(
    r"\b(?P<co>co-)?directed(?:,? (?:and |& )?(?:co-)?(?:produced|written|edited|shot|narrated|scripted|filmed"
    r"|photographed|animated|composed))*(?:,? and [a-z]+ed|,? and written)? by (?:and (?:starring|featuring) )?",
    re.IGNORECASE,
)
# "It is a remake of the 1931 film directed by Y": another film, if no comma follows.
_OTHER_WORK = re.compile(
    r"\b(?:remake of|adaptation of|adapted from|version of|sequel to|prequel to|follow-up to|based (?:up)?on"
    r"|inspired by|series|play|short film|segment|scenes?|sequences?|second unit|music)\b[^,;]*$",
    re.IGNORECASE,
)
# "A remake from 1990 was directed by Y": another film, in every sentence but the first.
_REMAKE = re.compile(r"\b(?:remake|remade|sequel|prequel|adapted|version)\b", re.IGNORECASE)
# A description before the name: "directed by the acclaimed Italian film director Y"
_ADJECTIVES = (
    r"acclaimed|award-winning|debutante?|documentary|experimental|famed|film|first-time|late|legendary|newcomer|noted"
    rf"|pioneering|renowned|stage|theatre|then|veteran|young|{NATIONALITY.pattern}"
)
_ROLE = re.compile(
    rf"(?:the )?(?:(?:{_ADJECTIVES}) )*(?:director|film-?maker|film maker|writer|actor|actress|comedian|cinematographer"
    r"|writer-director|screenwriter|producer|auteur|artist) (?=\w)"
)
# A second director after the name: "directed by Y and his brother Z"
_OTHERS = re.compile(
    r",? (?:and|&|with|together with|alongside|in collaboration with|assisted by) (?:(?:his|her|brother|sister|wife|son"
    r"|daughter|husband|father|director|filmmaker|actor|actress|producer|writer|co-directed by|directed by) )*"
    r"[^\W\d_a-z]"
)
# Words of the first sentence of a person's page, which can also say "film" and "directed"
_PERSON = re.compile(r"\b(?:actor|actress|singer|composer|best known|known for|editor|critic|born)\b")


@dataclass(frozen=True, slots=True)
class Film:
    """The facts of a film's page.

    Attributes:
        year: the year of release; None if the page does not state one clear year.
        director: the name of the director; None if the page names none or several.

    Example:
        Film(title="Salt on the Quay", year=1961, director="Edda Lindqvane")
    """

    title: str
    year: int | None
    director: str | None


def read_film(page: Passage) -> Film | None:
    """Return the facts of a film's page; None if the page is not about a film."""
    text = tidy(page.text)
    verb = _IS.search(text)
    if verb is None or verb.start() > 250:
        return None
    definition = re.split(r"(?<=[\w)\"])[.;] ", text[verb.end() : verb.end() + 250])[0]
    kind = _KIND.search(definition)
    if kind is None or _OTHER_KIND.search(definition[: kind.end() + 12]):
        return None
    year = _year(page.title, text[: verb.start()], definition[: kind.start()], definition[kind.end() :])
    director = _director(text)
    if year is None and (director is None or "directed" not in definition or _PERSON.search(definition)):
        return None
    return Film(page.title, year, director)


def _year(title: str, start: str, before: str, after: str) -> int | None:
    """Return the release year of a film; None if the page does not state exactly one year.

    All arguments except ``title`` are parts of the page's first sentence. ``start`` is the part before "is a", the
    argument ``before`` is the part between "is a" and "film", and the argument ``after`` is the part after "film". For
    "Salt (1953) is a comedy film of 1953", the parts are "Salt (1953) ", "comedy " and " of 1953".
    """
    in_title = re.search(rf"\(({_YEAR.pattern})\b.*\)$", title)
    at_start = re.search(rf"\(({_YEAR.pattern})\) ?$", start)
    released = re.match(rf" (?:from|of|released in|made in|that was released in) ({_YEAR.pattern})", after)
    stated = {*_YEAR.findall(before), *(match[1] for match in (at_start, released) if match)}
    years = stated | {match[1] for match in (in_title,) if match and stated}
    return int(years.pop()) if len(years) == 1 else None


def _director(text: str) -> str | None:
    """Return the name after "directed by" on a film's page.

    Return None if the name is missing or only a surname, if there are several names, or if a sentence with "directed
    by" is about another work.
    """
    names: dict[str, str] = {}
    for match in _DIRECTED.finditer(text):
        *earlier, sentence = re.split(r"(?<=\w\w)[.;] ", text[: match.start()])
        name = _only_name(text[match.end() :])
        if match["co"] or name is None or _OTHER_WORK.search(sentence) or (earlier and _REMAKE.search(sentence)):
            return None
        names[name_key(name)] = name
    name = next(iter(names.values())) if len(names) == 1 else ""
    is_surname = " " not in name and re.search(rf"[^\W\d_a-z][\w.'-]* {re.escape(name)}\b", text)
    return None if is_surname else name or None


def _only_name(text: str) -> str | None:
    """Return the person's name at the beginning of ``text``, or directly after a description at the beginning.

    Return None if there is no name, or if there are several names.

    Example:
        "Sergio Leone" for "Italian filmmaker Sergio Leone and starring ..."
    """
    if role := _ROLE.match(text):
        text = text[role.end() :]
    name = read_person(text)
    rest = text[len(name) :]
    if not name or NATIONALITY.fullmatch(name) or "Brothers" in name or name.endswith("'s"):
        return None
    if _OTHERS.match(rest) or re.match(r"/|, [^\W\d_a-z]| brothers| sisters| \(and| (?:co-)?founder", rest):
        return None
    return name
