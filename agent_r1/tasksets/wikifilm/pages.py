"""Read the pages of a corpus, and shorten each page to the part that a search shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord
from agent_r1.retrieval.retriever import TOP_K, Found, Passage, Retriever, unique
from agent_r1.tasksets.hub import read_rows_or_hub
from agent_r1.tasksets.multihop.aliases import ALIASES_FILE
from agent_r1.tasksets.multihop.fields import parse_context

SHOWN = 600
"""The maximum number of characters of a page that a search shows. Facts are read only from this part."""

_SENTENCES = TypeAdapter(list[str])


def read_pages(source: Path) -> tuple[Passage, ...]:
    """Read the pages of a file, of a split on the hub, or of all JSON files in a folder.

    The fields of a row decide its format:

    - a corpus of passages: ``title`` and ``text``
    - 2WikiMultihopQA's ``para_with_hyperlink.jsonl``: ``title`` and ``sentences``, a list of texts
    - 2WikiMultihopQA's files of questions: ``context``, a list of [title, [sentence, ..]] pairs. All other fields, such
      as the question, are ignored

    Raises InvalidInput, which names the file and the row, if a row cannot be used.
    """
    return unique(page for part in _parts(source) for row in read_rows_or_hub(part) for page in _pages(row))


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
        try:
            sentences = _SENTENCES.validate_python(row.values["sentences"])
        except ValidationError as error:
            raise row.error("sentences that are no texts", "give sentences as a list of texts") from error
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
