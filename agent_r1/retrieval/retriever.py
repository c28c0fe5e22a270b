"""The protocol of a retriever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import bm25s
import numpy as np

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.files import build_once, read_records


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


TOP_K = 5
"""The default number of passages per query (as in arXiv 2511.14460)."""

Found = list[tuple[Passage, ...]]
"""The passages that were found: one tuple per query, best passage first."""


class Retriever(Protocol):
    """An object that searches passages for many queries at once. Several threads can call it at the same time."""

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """Return at most ``k`` passages for each query, best passage first. The queries keep their order."""
        ...


class RetrievalError(AgentR1Error):
    """Raised if a retriever is not available. The message is one line."""


class BM25Index:
    """A BM25 index over titles and texts (Lucene's variant, k1 1.5, b 0.75, English stop words, no stemming).

    Raises InvalidInput if the passages have no words other than stop words.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        words = bm25s.tokenize([passage.indexed_text for passage in self.passages], show_progress=False)
        if not words.vocab:
            raise InvalidInput("corpus", got="passages without any word", do="give passages with text")
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """Return at most ``k`` passages for each query, best first; each contains a word of the query."""
        words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        return [tuple(self.passages[index] for index in self._best(query, k)) for query in words]

    def _best(self, words: list[str], k: int) -> list[int]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        k = min(k, len(scores))
        # Sort all passages whose score is at least the k-th highest score. np.argpartition alone would select an
        # arbitrary passage among passages of equal score.
        threshold = np.partition(scores, -k)[-k]
        found = np.flatnonzero((scores >= threshold) & (scores > 0))
        return found[np.argsort(-scores[found], kind="stable")][:k].tolist()


FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs from which vectors or a faiss index were computed.

    Attributes:
        passages: the checksum of the passages.
        encoder: the fingerprint of the sentence encoder.
        passage_prefix: the text before every passage.
        factory: the factory string of the faiss index; "" for vectors without an index.
    """

    passages: str
    encoder: str
    passage_prefix: str
    factory: str

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:32]


def build_vectors(cache: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return the folder in ``cache`` with the vectors or the faiss index that was computed from ``origin``.

    If the folder is missing or damaged, ``make(folder)`` is called and writes the files. Raises InvalidInput if the
    folder cannot be created.
    """
    try:
        return build_once(cache.expanduser() / origin.key, {"format": FORMAT, **asdict(origin)}, make)
    except OSError as error:
        raise InvalidInput("cache", got=f"{cache}: {error.strerror}", do="name a writable folder") from error
