"""Retrieval: BM25 and dense indexes, the retrieval server and its client, and the search tool.

Import ``retrieval.open``, ``retrieval.tool`` and ``retrieval.server`` by name: they load numpy or torch.
"""

from agent_r1.retrieval.passages import Passage, read_corpus
from agent_r1.retrieval.retriever import RetrievalError, Retriever

__all__ = ["Passage", "RetrievalError", "Retriever", "read_corpus"]
