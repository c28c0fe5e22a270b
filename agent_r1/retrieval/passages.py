"""Passages of a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.jsonl import read_records


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled piece of text, such as Passage("Animorphs", "Animorphs is a science fantasy series ...")."""

    title: str
    text: str

    @property
    def indexed_text(self) -> str:
        return f"{self.title}\n{self.text}"


def read_corpus(path: Path) -> tuple[Passage, ...]:
    """Read the passages of a JSON or JSONL file, whose rows have the fields ``title`` and ``text``.

    Raises InvalidInput, which names the file and the row, if a row cannot be read.
    """
    return tuple(Passage(row.get_text("title"), row.get_text("text")) for row in read_records(path))


def unique(passages: Iterable[Passage]) -> tuple[Passage, ...]:
    """Return the passages without duplicates, in the order of their first occurrence."""
    return tuple(dict.fromkeys(passages))


def corpus_checksum(passages: Iterable[Passage]) -> str:
    total = hashlib.sha256()
    for passage in passages:
        for text in (passage.title, passage.text):
            data = text.encode("utf-8", "surrogatepass")
            total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
