"""Read names of persons and places, dates and nationalities from the text of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """Return the letters and digits of a name, in lower case. "Pat O' Brien" and "Pat O'Brien" have the same key."""
    return "".join(character for character in name.casefold() if character.isalnum())


def title_name(title: str) -> str:
    """Return the title of a page without an addition in parentheses at its end, such as "(director)"."""
    return re.sub(r" ?\([^()]*\)$", "", title).strip()


def as_spelled(value: str, text: str) -> str | None:
    """Return the part of ``text`` that equals ``value`` apart from spaces; None if there is no such part."""
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
    # Particles such as "van" may stand between the capitalized words.
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


MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

_MONTH = "|".join(MONTHS)
_YEAR = r"(?:1[5-9]|20)\d\d"
_DATE = re.compile(
    rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH}),? (?P<year>{_YEAR})"
    rf"|(?<![^\W\d_])(?P<month_first>{_MONTH})(?: (?P<day_second>\d{{1,2}})(?:st|nd|rd|th)?,?)? (?P<year_last>{_YEAR})"
    rf"|(?<!\w)(?P<only_year>{_YEAR})(?!\w)"
)


@dataclass(frozen=True, slots=True)
class Date:
    """A date that is exact to the day, to the month (day 0) or to the year (month 0, day 0)."""

    year: int
    month: int = 0
    day: int = 0

    def written(self) -> tuple[str, ...]:
        """Return the date in each format that counts as a right answer. 2WikiMultihopQA has the first format."""
        if not self.month:
            return (str(self.year),)
        month = MONTHS[self.month - 1]
        if not self.day:
            return (f"{month} {self.year}",)
        return (
            f"{self.day} {month} {self.year}",
            f"{month} {self.day}, {self.year}",
            f"{self.year}-{self.month:02}-{self.day:02}",
        )


@dataclass(frozen=True, slots=True)
class FoundDate:
    """A date that a text contains at ``text[start:end]``."""

    date: Date
    start: int
    end: int


def find_dates(text: str) -> Iterator[FoundDate]:
    """Yield the dates in a text, in order. Some passages of 2WikiMultihopQA have two dates without a space between.

    Example:
        >>> [found.date.written()[0] for found in find_dates("May 3, 1918June 1, 1970; a film of 1935")]
        ['3 May 1918', '1 June 1970', '1935']
    """
    for match in _DATE.finditer(text):
        month = match["month"] or match["month_first"]
        day = int(match["day"] or match["day_second"] or 0)
        year = int(match["year"] or match["year_last"] or match["only_year"])
        if day <= 31:
            yield FoundDate(Date(year, MONTHS.index(month) + 1 if month else 0, day), match.start(), match.end())


_UNITED_KINGDOM = ("United Kingdom", "UK", "Great Britain", "Britain")

COUNTRIES: Mapping[str, tuple[str, ...]] = {
    "American": ("United States", "United States of America", "America", "USA", "US"),
    "British": _UNITED_KINGDOM,
    "English": ("England", *_UNITED_KINGDOM),
    "Scottish": ("Scotland", *_UNITED_KINGDOM),
    "Welsh": ("Wales", *_UNITED_KINGDOM),
    "Northern Irish": ("Northern Ireland", *_UNITED_KINGDOM),
    "Dutch": ("Netherlands", "Holland"),
    "Czech": ("Czech Republic", "Czechia"),
    "Soviet": ("Soviet Union", "USSR"),
    **{
        nationality: (country,)
        for nationality, country in re.findall(
            r"(\S.*?): (\S.*?)(?:;|$)",
            "Afghan: Afghanistan; Albanian: Albania; Algerian: Algeria; Angolan: Angola; Argentine: Argentina; "
            "Argentinian: Argentina; Armenian: Armenia; Australian: Australia; Austrian: Austria; "
            "Azerbaijani: Azerbaijan; Bangladeshi: Bangladesh; Belarusian: Belarus; Belgian: Belgium; "
            "Bolivian: Bolivia; Bosnian: Bosnia and Herzegovina; Brazilian: Brazil; Bulgarian: Bulgaria; "
            "Burmese: Myanmar; Cambodian: Cambodia; Cameroonian: Cameroon; Canadian: Canada; Chadian: Chad; "
            "Chilean: Chile; Chinese: China; Colombian: Colombia; Croatian: Croatia; Cuban: Cuba; Cypriot: Cyprus; "
            "Czechoslovak: Czechoslovakia; Danish: Denmark; Ecuadorian: Ecuador; Egyptian: Egypt; Estonian: Estonia; "
            "Ethiopian: Ethiopia; Filipino: Philippines; Finnish: Finland; French: France; Georgian: Georgia; "
            "German: Germany; Ghanaian: Ghana; Greek: Greece; Guatemalan: Guatemala; Haitian: Haiti; "
            "Hong Kong: Hong Kong; Hungarian: Hungary; Icelandic: Iceland; Indian: India; Indonesian: Indonesia; "
            "Iranian: Iran; Iraqi: Iraq; Irish: Ireland; Israeli: Israel; Italian: Italy; Jamaican: Jamaica; "
            "Japanese: Japan; Jordanian: Jordan; Kazakh: Kazakhstan; Kenyan: Kenya; Korean: Korea; "
            "Kosovan: Kosovo; Kyrgyz: Kyrgyzstan; Latvian: Latvia; Lebanese: Lebanon; Lithuanian: Lithuania; "
            "Macedonian: North Macedonia; Malaysian: Malaysia; Malian: Mali; Maltese: Malta; "
            "Mauritanian: Mauritania; Mexican: Mexico; Mongolian: Mongolia; Moroccan: Morocco; Nepalese: Nepal; "
            "Nepali: Nepal; New Zealand: New Zealand; Nigerian: Nigeria; Norwegian: Norway; Pakistani: Pakistan; "
            "Palestinian: Palestine; Panamanian: Panama; Peruvian: Peru; Polish: Poland; Portuguese: Portugal; "
            "Puerto Rican: Puerto Rico; Romanian: Romania; Russian: Russia; Senegalese: Senegal; Serbian: Serbia; "
            "Singaporean: Singapore; Slovak: Slovakia; Slovene: Slovenia; Slovenian: Slovenia; "
            "South African: South Africa; South Korean: South Korea; Spanish: Spain; Sri Lankan: Sri Lanka; "
            "Sudanese: Sudan; Swedish: Sweden; Swiss: Switzerland; Syrian: Syria; Taiwanese: Taiwan; Thai: Thailand; "
            "Tunisian: Tunisia; Turkish: Turkey; Ugandan: Uganda; Ukrainian: Ukraine; Uruguayan: Uruguay; "
            "Venezuelan: Venezuela; Vietnamese: Vietnam; Yugoslav: Yugoslavia",
        )
    },
}
"""The names of a country, by nationality. The usual name comes first."""

_CHANGED = frozenset({"Soviet", "Yugoslav", "Czechoslovak", "Korean", "Hong Kong", "Puerto Rican", "Palestinian"})
"""Nationalities whose country is not clear, because the country was divided or belongs to another country."""

NATIONALITY = re.compile(rf"\b(?:{'|'.join(sorted(COUNTRIES, key=len, reverse=True))})\b")


def country(nationality: str) -> str | None:
    """Return the country of a nationality; None if the country is not clear, as for "Soviet" or "Hong Kong".

    All nationalities of the United Kingdom have the same country.
    """
    if nationality in _CHANGED:
        return None
    names = COUNTRIES[nationality]
    return _UNITED_KINGDOM[0] if _UNITED_KINGDOM[0] in names else names[0]
