"""The passages that a search looks through."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.jsonl import read_rows


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled piece of text.

    Example:
        Passage("Animorphs", "Animorphs is a science fantasy series of young adult books ...")
    """

    title: str
    text: str

    @property
    def searched(self) -> str:
        """What a search looks through: the title on a line of its own, then the text."""
        return f"{self.title}\n{self.text}"


def read_corpus(path: Path) -> tuple[Passage, ...]:
    """Read rows of ``title`` and ``text``. Raises InvalidInput, naming the file and the row."""
    return tuple(Passage(row.text("title"), row.text("text")) for row in read_rows(path))


def unique(passages: Iterable[Passage]) -> tuple[Passage, ...]:
    """Each passage once, in the order they came first."""
    return tuple(dict.fromkeys(passages))


def digest(passages: Iterable[Passage]) -> str:
    """sha256 of the passages in their order; their number and where each ends count too."""
    total = hashlib.sha256()
    for passage in passages:
        for text in (passage.title, passage.text):
            data = text.encode("utf-8", "surrogatepass")
            total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
