"""The protocol of a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent_r1.core.errors import AgentR1Error
from agent_r1.retrieval.passages import Passage

TOP_K = 5
"""The default number of passages per query (as in arXiv 2511.14460)."""

Found = list[tuple[Passage, ...]]
"""The passages that were found: one tuple per query, best passage first."""


class Retriever(Protocol):
    """An object that searches passages for many queries at once. Several threads can call it at the same time."""

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """Return at most ``k`` passages for each query, best passage first. The queries keep their order.

        Raise RetrievalError if the retriever is not available.
        """
        ...


class RetrievalError(AgentR1Error):
    """Raised if a retriever is not available. The message is one line."""
