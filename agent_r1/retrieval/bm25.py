"""BM25 search over passages."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np

from agent_r1.core.errors import InvalidInput
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.retriever import TOP_K, Found


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
        """Return at most ``k`` passages for each query, best passage first. A passage must contain a word of the query.

        Passages of equal score come in the order of the corpus.
        """
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
