"""Retrieval: BM25 and dense indexes over passages, the retrieval server and its client, and the search tool.

This package does not import the modules that load numpy or torch. Import them by their names: ``retrieval.open``,
``retrieval.tool``, ``retrieval.server``.
"""

from agent_r1.retrieval.passages import Passage, read_corpus
from agent_r1.retrieval.retriever import RetrievalError, Retriever

__all__ = ["Passage", "RetrievalError", "Retriever", "read_corpus"]
