"""The passages that a search looks through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent_r1.tasks.multihop.reading import read_rows


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled piece of text.

    Example:
        Passage("Animorphs", "Animorphs is a science fantasy series of young adult books ...")
    """

    title: str
    text: str


def read_corpus(path: Path) -> tuple[Passage, ...]:
    """Read rows of ``title`` and ``text``. Raises InvalidInput, naming the file and the row."""
    return tuple(Passage(row.text("title"), row.text("text")) for row in read_rows(path))


def unique(passages: Iterable[Passage]) -> tuple[Passage, ...]:
    """Each passage once, in the order they came first."""
    return tuple(dict.fromkeys(passages))
