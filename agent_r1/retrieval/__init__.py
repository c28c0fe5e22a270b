"""Retrieval: BM25 and dense indexes, the retrieval server and its client, and the search tool.

This package does not import its modules ``open``, ``tool`` and ``server``, which load numpy or torch. A caller imports
them by their full names, such as ``agent_r1.retrieval.retriever``.
"""
