"""The contract of a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent_r1.core.errors import AgentR1Error
from agent_r1.retrieval.passages import Passage

TOP_K = 5
"""Passages that a search returns (as in arXiv 2511.14460)."""

Found = list[tuple[Passage, ...]]
"""For each query its passages, best first."""


class Retriever(Protocol):
    """Searches passages for many queries at once; safe to call from several threads."""

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """Return at most ``k`` passages for each query. Raises RetrievalError if the search is not available."""
        ...


class RetrievalError(AgentR1Error):
    """A retriever is not available; the message gives the reason in one line."""
