"""Retrieval: BM25 and dense indexes over passages, the retrieval server and its client, and the search tool.

The modules that load numpy or torch are imported by name: ``retrieval.open``, ``retrieval.tool``, ``retrieval.server``.
"""

from agent_r1.retrieval.passages import Passage, read_corpus
from agent_r1.retrieval.retriever import RetrievalError, Retriever

__all__ = ["Passage", "RetrievalError", "Retriever", "read_corpus"]
