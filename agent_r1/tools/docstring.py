"""Parse Google-style docstrings into a summary and descriptions of the arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Attributes|Warnings?):\s*$")
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """A parsed docstring: the text before the first section, and the description of each argument.

    Example:
        Docstring(summary="Look passages up.", arguments={"query": "the text to look for."})
    """

    summary: str
    arguments: Mapping[str, str]


def parse_docstring(text: str) -> Docstring:
    """Parse a docstring into its summary and the descriptions in its section ``Args:``.

    Example:
        >>> parse_docstring("Add up.\\n\\nArgs:\\n    a: one\\n        number.\\n    b (int): another.").arguments
        {'a': 'one number.', 'b': 'another.'}
    """
    summary: list[str] = []
    arguments: list[str] = []
    target = summary
    for line in inspect.cleandoc(text).splitlines():
        if section := _SECTION.match(line):
            target = arguments if section[1].startswith("Arg") else []
        elif target is arguments and line and not line[0].isspace():
            target = []  # a line without indentation ends the entries
        else:
            target.append(line)
    return Docstring(
        _join_paragraphs(summary), _parse_entries(inspect.cleandoc("\n".join(["", *arguments])).splitlines())
    )


def _join_paragraphs(lines: list[str]) -> str:
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _parse_entries(lines: list[str]) -> dict[str, str]:
    """Return the description of each argument, by name, from the ``lines`` of a section.

    Each line that is not ``name: text`` or ``name (type): text`` continues the description before it.
    """
    entries: dict[str, str] = {}
    name = None
    for line in lines:
        if entry := _ENTRY.match(line):
            name = entry[1]
            entries[name] = entry[2].strip()
        elif name is not None:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries
