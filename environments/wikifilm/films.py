"""Read the pages of a corpus: films, their years and directors, and the split to which each film belongs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord
from agent_r1.retrieval.retriever import TOP_K, Found, Passage, Retriever, unique
from agent_r1.tasksets.files import read_rows
from agent_r1.tasksets.multihop.questions import ALIASES_FILE, parse_context
from environments.wikifilm.persons import Person, read_director
from environments.wikifilm.text import NATIONALITY, as_spelled, name_key, read_person, tidy, title_name

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
    # For "Salt (1953) is a comedy film of 1953", the parts are "Salt (1953) ", "comedy " and " of 1953".
    in_title = re.search(rf"\(({_YEAR.pattern})\b.*\)$", title)
    at_start = re.search(rf"\(({_YEAR.pattern})\) ?$", start)
    released = re.match(rf" (?:from|of|released in|made in|that was released in) ({_YEAR.pattern})", after)
    stated = {*_YEAR.findall(before), *(match[1] for match in (at_start, released) if match)}
    years = stated | {match[1] for match in (in_title,) if match and stated}
    return int(years.pop()) if len(years) == 1 else None


def _director(text: str) -> str | None:
    # None if the name after "directed by" is missing or only a surname, if there are several names, or if a sentence
    # with "directed by" is about another work
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
    # "Sergio Leone" for "Italian filmmaker Sergio Leone and starring .."; None if there is no name or are several
    if role := _ROLE.match(text):
        text = text[role.end() :]
    name = read_person(text)
    rest = text[len(name) :]
    if not name or NATIONALITY.fullmatch(name) or "Brothers" in name or name.endswith("'s"):
        return None
    if _OTHERS.match(rest) or re.match(r"/|, [^\W\d_a-z]| brothers| sisters| \(and| (?:co-)?founder", rest):
        return None
    return name


SHARES: Mapping[str, int] = {"train": 65, "validation": 10, "test": 25}
"""The share of the families that each split gets, in percent."""


def divide_families(families: Iterable[Sequence[str]]) -> Mapping[str, str]:
    """Return the split ("train", "validation" or "test") of each name in ``families``.

    A family is a list of names of films and persons that must be in the same split, such as a film and its director.
    Families with a common name are merged: ("Jaws", "Steven Spielberg") and ("Lincoln", "Steven Spielberg").
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]  # halve the path
            name = parent[name]
        return name

    for first, *others in families:
        for name in (first, *others):
            one, other = sorted((root(first), root(name)))
            parent[other] = one  # the first name in alphabetical order is the root
    return {name: class_of(root(name)) for name in tuple(parent)}


def class_of(name: str) -> str:
    """Return the split of a family by a hash of its alphabetically first name, equal on every machine."""
    number = int.from_bytes(hashlib.sha256(f"wikifilm|{name}".encode()).digest()[:8], "big") % 100
    if number < SHARES["train"]:
        return "train"
    return "validation" if number < SHARES["train"] + SHARES["validation"] else "test"


SHOWN = 600
"""The maximum number of characters of a page that a search shows. Facts are read only from this part."""


def read_pages(source: Path) -> tuple[Passage, ...]:
    """Read the pages of a file, of a split on the hub, or of all JSON files in a folder.

    The fields of a row decide its format:

    - a corpus of passages: ``title`` and ``text``
    - 2WikiMultihopQA's ``para_with_hyperlink.jsonl``: ``title`` and ``sentences``, a list of texts
    - 2WikiMultihopQA's files of questions: ``context``, a list of [title, [sentence, ..]] pairs. All other fields, such
      as the question, are ignored

    Raises InvalidInput, which names the file and the row, if a row cannot be used.
    """
    return unique(page for part in _parts(source) for row in read_rows(part) for page in _pages(row))


def _parts(source: Path) -> Sequence[Path]:
    if not source.is_dir():
        return (source,)
    parts = sorted(path for path in source.iterdir() if path.suffix in (".json", ".jsonl"))
    if not (parts := [path for path in parts if path.name != ALIASES_FILE]):
        raise InvalidInput(str(source), got="no JSON files", do="give a folder with files of pages, or a file")
    return parts


def _pages(row: JsonRecord) -> Iterator[Passage]:
    if "context" in row.values:
        yield from parse_context(row)
    elif "sentences" in row.values:
        sentences = row.values["sentences"]
        if not isinstance(sentences, list) or not all(isinstance(each, str) for each in sentences):
            raise row.error("sentences that are no texts", "give sentences as a list of texts")
        yield Passage(row.get_text("title"), " ".join(sentence.strip() for sentence in sentences))
    else:
        yield Passage(row.get_text("title"), row.get_text("text"))


def shorten(page: Passage) -> Passage:
    """Return the page, cut after a sentence to at most ``SHOWN`` characters. If no sentence fits, cut after a word."""
    if len(page.text) <= SHOWN:
        return page
    start = page.text[:SHOWN]
    ends = [match.end() for match in re.finditer(r"\w\w[)\"]?\.(?=\s)", start)]
    return Passage(page.title, start[: ends[-1]] if ends else start.rpartition(" ")[0] or start)


@dataclass(frozen=True, slots=True)
class ShortPages:
    """A retriever that shortens the pages that another retriever finds (see :func:`shorten`)."""

    retriever: Retriever

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        return [tuple(map(shorten, pages)) for pages in self.retriever.search(queries, k)]


AGES = (14, 100)
"""The minimum and the maximum age of a director in the year of a film. Others of the name are other persons."""

YEARS_AFTER_DEATH = 3
"""The maximum number of years from a director's death to the release of the film."""


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
        """Return ``values``, and then their spellings on the page ``title``; () if the page contains none of them."""
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
    directed: list[DirectedFilm] = []
    for film in films:
        named = directors.get(name_key(film.director), []) if film.director else []
        matches = len(named) == 1 and _can_have_made(film, named[0])
        directed.append(DirectedFilm(film, named[0] if matches else None))
    classes = divide_families(map(_family, directed))
    return FilmFacts(
        films=tuple(directed),
        texts={title: page.text for title, page in first.items()},
        classes={title: classes[name_key(title)] for one in directed for title in _titles(one)},
    )


def _can_have_made(film: Film, person: Person) -> bool:
    if film.year is None:
        return True
    old_enough = person.birth is None or AGES[0] <= film.year - person.birth.year <= AGES[1]
    return old_enough and (person.death is None or film.year - person.death.year <= YEARS_AFTER_DEATH)


def _titles(one: DirectedFilm) -> tuple[str, ...]:
    return (one.film.title, one.director.title) if one.director else (one.film.title,)


def _family(one: DirectedFilm) -> list[str]:
    person = one.director
    names = (*_titles(one), one.film.director, person.father if person else None)
    return [name_key(name) for name in names if name]
