"""Retrieval: BM25 and dense indexes, the retrieval server and its client, and the search tool.

``retrieval.open``, ``retrieval.tool`` and ``retrieval.server`` load numpy or torch, and are imported separately.
"""

from agent_r1.retrieval.passages import Passage, read_corpus
from agent_r1.retrieval.retriever import RetrievalError, Retriever

__all__ = ["Passage", "RetrievalError", "Retriever", "read_corpus"]
