"""Read names of persons and places from the text of a page."""

from __future__ import annotations

import re

_WORD = re.compile(r"(?:[^\W\d_]\.-?)+|(?:Jr|Sr|St|Dr)\.|[^\W\d_](?:[\w'\u2019]|-(?=\w))*")
_PERSON_PARTICLES = "af|al|bin|da|das|de|del|della|den|der|di|do|dos|du|el|la|le|ten|ter|van|vom|von|y|zu|zum"
_PLACE_PARTICLES = "am|auf|da|de|del|della|der|des|di|do|dos|du|el|en|la|las|le|les|sul|sur|upon"
_OF = re.compile(r"(?:Bay|Canton|City|County|Gulf|Isle|Province|Republic|State|Town)s? of ")
_ELIDED = re.compile(r"(?:d|l|dell|all)['\u2019]\w")
_SUFFIX = re.compile(r",? (?:Jr|Sr)\b\.?")

_SPACED = (
    (re.compile("\u2019"), "'"),
    (re.compile(r"\s+"), " "),
    (re.compile(r" ?\( ?"), " ("),
    (re.compile(r" \)"), ")"),
    (re.compile(r"(?<=[^\W\d_])- (?=[^\W\d_])"), "-"),
    (re.compile(r"\b([A-Zdl])(['\u2019]) (?=[A-Z])"), r"\1\2"),
)


def tidy(text: str) -> str:
    """Return the text with ordinary spacing. The passages of 2WikiMultihopQA have spaces in wrong places.

    Example:
        >>> tidy("Dolores O' Riordan( born 1971) was half- Irish")
        "Dolores O'Riordan (born 1971) was half-Irish"
    """
    for pattern, replacement in _SPACED:
        text = pattern.sub(replacement, text)
    return text.strip()


def name_key(name: str) -> str:
    """Return the letters and digits of a name, in lower case.

    Example:
        >>> name_key("Pat O' Brien") == name_key("Pat O'Brien")
        True
    """
    return "".join(character for character in name.casefold() if character.isalnum())


def title_name(title: str) -> str:
    """Return the title of a page without an addition in parentheses at its end.

    Example:
        >>> title_name("Tom Clegg (director)")
        'Tom Clegg'
    """
    return re.sub(r" ?\([^()]*\)$", "", title).strip()


def as_spelled(value: str, text: str) -> str | None:
    """Return the part of ``text`` that equals ``value`` apart from spaces; None if there is no such part.

    Example:
        >>> as_spelled("Pat O'Brien", "It stars Pat O' Brien.")
        "Pat O' Brien"
    """
    if value in text:
        return value
    bare, squeezed = "".join(value.split()), "".join(text.split()).replace("\u2019", "'")
    if bare not in squeezed:
        return None
    pattern = r"\s*".join(map(re.escape, bare)).replace("'", "['\u2019]")
    match = re.search(pattern, text)
    return match.group() if match else None


def read_person(text: str) -> str:
    """Return the person's name at the beginning of ``text``, or "".

    Example:
        >>> read_person("J. Lee van der Berg, Jr. and starring Ann Lee")
        'J. Lee van der Berg, Jr.'
    """
    name = _read_capitalized(text, _PERSON_PARTICLES)
    suffix = _SUFFIX.match(text, len(name)) if name else None
    return name + suffix.group() if suffix else name


def read_place(text: str) -> tuple[str, ...]:
    """Return the parts of the place at the beginning of ``text``, the smallest part first, or ().

    Example:
        >>> read_place("Stratford-upon-Avon, Warwickshire, England to Ann Lee")
        ('Stratford-upon-Avon', 'Warwickshire', 'England')
    """
    parts: list[str] = []
    while part := _read_capitalized(text, _PLACE_PARTICLES):
        parts.append(part)
        text = text[len(part) :]
        if not text.startswith(", "):
            break
        text = text[2:]
    return tuple(parts)


def _read_capitalized(text: str, particles: str) -> str:
    """Return the capitalized words with which ``text`` begins. ``particles`` such as "van" may stand between them."""
    of = _OF.match(text)
    at = end = of.end() if of else 0
    while word := _WORD.match(text, at):
        if word.group()[0].isupper() or _ELIDED.match(word.group()):
            end = word.end()
        elif word.group() not in particles.split("|") or not end:
            break
        if text[word.end() : word.end() + 1] != " ":
            break
        at = word.end() + 1
    return text[:end]
