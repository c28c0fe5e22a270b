"""What every way of searching has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agent_r1.core.errors import AgentR1Error
from agent_r1.retrieval.passages import Passage

TOP_K = 5
"""Passages a search returns; as many as in paper 2511.14460."""

Found = list[tuple[Passage, ...]]
"""For each query the best passages, best first."""


class Retriever(Protocol):
    """Searches passages for many queries at once; safe to call from several threads."""

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        """At most ``k`` passages for each query. Raises RetrieverFailed where none of them can be answered now."""
        ...


class RetrieverFailed(AgentR1Error):
    """A retriever could not answer, whatever was asked; says why in one line."""
