"""The protocol of a retriever."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np
import regex
from bm25s.stopwords import STOPWORDS_EN
from bm25s.tokenization import Tokenized

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.files import build_once, read_records
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.text import fold
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result


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


# Words; single characters, except the s of Bruno's; the ++ of C++; and names such as AT&T, beside their parts.
_WORD = regex.compile(r"\w\w+|(?<!\w['\u2019])\w|(?<=\w)[+#]+")
_SHORT_NAME = regex.compile(r"(?<![\w&])\w{1,2}(?:&\w{1,2})+(?![\w&])")
# The words of scripts without spaces are single characters, with their marks, and pairs of neighbors.
_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
_CHARACTER = regex.compile(_SPACELESS)
_PAIR = regex.compile(rf"(?!\p{{M}}){_SPACELESS}{_SPACELESS}")
_STOP_WORDS = frozenset(STOPWORDS_EN)


def _words(text: str) -> list[str]:
    folded = fold(text)
    words = [word for word in _split(folded) if word not in _STOP_WORDS] + _SHORT_NAME.findall(folded)
    return words if folded.isascii() else words + _PAIR.findall(folded, overlapped=True)


def _split(folded: str) -> list[str]:
    return _WORD.findall(folded if folded.isascii() else _CHARACTER.sub(r" \g<0> ", folded))


def _title_key(text: str) -> str:
    folded = fold(text)  # stop words are words of a title, and punctuation is if it is all
    return " ".join(_split(folded) or folded.split())


class BM25Index:
    """A BM25 index over titles and texts (Lucene's variant, k1 1.5, b 0.75, English stop words, no stemming).

    A passage whose title is the query comes first. Raises InvalidInput if the passages have no words other than stop
    words.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        ids: defaultdict[str, int] = defaultdict()
        ids.default_factory = ids.__len__
        indexed = [[ids[word] for word in _words(passage.indexed_text)] for passage in self.passages]
        if not ids:
            raise InvalidInput("corpus", got="passages without any word", do="give passages with text")
        self._index = bm25s.BM25()
        self._index.index(Tokenized(indexed, dict(ids)), show_progress=False)
        self._by_title: dict[str, list[int]] = {}
        for index, passage in enumerate(self.passages):
            self._by_title.setdefault(_title_key(passage.title), []).append(index)

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """Return at most ``k`` passages for each query, best first.

        Each contains a word of the query, or has the query as its title.
        """
        return [tuple(self.passages[index] for index in self._best(query, k)) for query in queries]

    def _best(self, query: str, k: int) -> list[int]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(_words(query)))
        if titled := self._by_title.get(_title_key(query)):
            scores[titled] += scores.max() + 1
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


NOTHING_FOUND = "No passage matches this query."


def search_tool(retriever: Retriever, k: int = TOP_K) -> Tool:
    """Return a search tool. A result shows at most ``k`` passages, and the titles of the passages are its ``data``.

    Waiting calls of different episodes are sent to the retriever as one batch. If the retriever fails, all calls of the
    batch fail.
    """

    @tool(batch=lambda calls: _search(retriever, [call["query"] for call in calls], k))
    def search(query: str) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return _search(retriever, [query], k)[0]

    return search


def search_tool_with_question(retriever: Retriever, k: int = TOP_K) -> Tool:
    """Return a search tool that repeats the task's question at the end of each result.

    The question is the last message of the task. If a result does not end with the question, a small model often gives
    a wrong answer. Except for the question, the results are the results of :func:`search_tool`.
    """

    def search_many(calls: list[dict[str, Any]]) -> list[ToolResult]:
        results = _search(retriever, [call["query"] for call in calls], k)
        return [_with_question(result, call["task"]) for result, call in zip(results, calls, strict=True)]

    @tool(batch=search_many)
    def search(query: str, task: Task) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return search_many([{"query": query, "task": task}])[0]

    return search


def _search(retriever: Retriever, queries: list[str], k: int) -> list[ToolResult]:
    try:
        found = retriever.search(queries, k)
    except RetrievalError as error:
        return [error_result(ToolErrorKind.RAISED, f"search failed: {error}")] * len(queries)
    titles = [tuple(passage.title for passage in passages) for passages in found]
    return [ToolResult((Text(render(each)),), ok=True, data=data) for each, data in zip(found, titles, strict=True)]


def _with_question(result: ToolResult, task: Task) -> ToolResult:
    if not result.ok:
        return result
    return replace(result, parts=(*result.parts, Text(f"\n\n{task.messages[-1].text}")))


def render(passages: Sequence[Passage]) -> str:
    """Return the passages as numbered text, or ``NOTHING_FOUND`` if there are none.

    Example:
        >>> print(render([Passage("Alba", "A river."), Passage("Bruno", "A king.")]))
        [1] Alba
        A river.
        <BLANKLINE>
        [2] Bruno
        A king.
    """
    numbered = (f"[{number}] {passage.title}\n{passage.text}" for number, passage in enumerate(passages, start=1))
    return "\n\n".join(numbered) or NOTHING_FOUND
