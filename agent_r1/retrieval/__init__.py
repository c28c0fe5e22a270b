"""Passages and how they are found: BM25, dense vectors, the retrieval server and its client, the search tool."""
