"""Find dates in the text of a page, and write dates in the formats of answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
    """A date that is exact to the day, to the month or to the year. A part that is not known is 0.

    Example:
        Date(1935, 9, 29), Date(1935, 9) for September 1935, Date(1935) for the year
    """

    year: int
    month: int = 0
    day: int = 0

    def written(self) -> tuple[str, ...]:
        """Return the date in each format that counts as a right answer. 2WikiMultihopQA has the first format.

        Example:
            ("29 September 1935", "September 29, 1935", "1935-09-29") for a day, ("September 1935",) for a month
        """
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
    """A date that a text contains at ``text[start:end]``.

    Example:
        FoundDate(Date(1935, 9, 29), start=5, end=22)
    """

    date: Date
    start: int
    end: int


def find_dates(text: str) -> Iterator[FoundDate]:
    """Yield the dates in a text, in order. A date with a day above 31 is left out.

    Two dates without a space between them are also found, because some passages of 2WikiMultihopQA contain such dates.

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
