"""Retrieval: BM25 and dense indexes, the retrieval server and its client, and the search tool."""
