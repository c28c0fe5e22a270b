"""The search tool: BM25 over a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text
from agent_r1.core.task import ToolResult
from agent_r1.env.tools import Tool, tool
from agent_r1.tasks.multihop.corpus import Passage

TOP_K = 5
"""Passages a search returns; as many as in paper 2511.14460."""

NOTHING_FOUND = "No passage matches this query."


class PassageIndex:
    """BM25 (Lucene's variant, k1 1.5, b 0.75, English stop words, no stemming) over titles and texts.

    Built once; searching changes nothing. Raises InvalidInput where the passages hold no word to search for.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = tuple(passages)
        texts = [f"{passage.title}\n{passage.text}" for passage in self.passages]
        words = bm25s.tokenize(texts, show_progress=False)
        if not words.vocab:
            raise InvalidInput("corpus", got="passages without a word", do="give passages of text")
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, queries: Sequence[str], k: int = TOP_K) -> list[tuple[Passage, ...]]:
        """The best passages for each query, best first; at most ``k``, and none that shares no word with the query.

        Passages of equal score come in the order of the corpus.
        """
        words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        return [tuple(self.passages[index] for index in self._best(query, k)) for query in words]

    def _best(self, words: list[str], k: int) -> list[int]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        k = min(k, len(scores))
        # All that tie with the k-th are sorted too: a partition alone would choose among equals arbitrarily.
        threshold = np.partition(scores, -k)[-k]
        found = np.flatnonzero((scores >= threshold) & (scores > 0))
        return found[np.argsort(-scores[found], kind="stable")][:k].tolist()


def search_tool(index: PassageIndex, k: int = TOP_K) -> Tool:
    """A tool that searches ``index`` and shows ``k`` passages; its results' ``data`` are their titles."""

    def search_many(calls: list[dict[str, Any]]) -> list[ToolResult]:
        return [_result(found) for found in index.search([call["query"] for call in calls], k)]

    @tool(batch=search_many)
    def search(query: str) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return search_many([{"query": query}])[0]

    return search


def _result(found: Sequence[Passage]) -> ToolResult:
    titles = tuple(passage.title for passage in found)
    return ToolResult((Text(render(found)),), ok=True, data=titles)


def render(passages: Sequence[Passage]) -> str:
    """The passages as an agent reads them.

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
