"""Fixtures for the tests of retrieval: passages, a bag-of-words encoder, and a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_scripts import load_benchmark

from agent_r1.retrieval.client import Health
from agent_r1.retrieval.retriever import BM25Index, Passage
from agent_r1.retrieval.server import RetrievalServer

PASSAGES = (
    Passage("Alba", "Alba is a river in the north. Bruno rules the land around Alba."),
    Passage("Bruno", "Bruno was a king, born in Carla."),
    Passage("Carla", "Carla is a town on a lake."),
    Passage("Lake district", "Many towns lie on a lake."),
    Passage("Zoë", "Zoë sails."),
)


@pytest.fixture(scope="session")
def benchmark_script():
    return load_benchmark("retrieval")


@pytest.fixture(scope="session")
def passages() -> tuple[Passage, ...]:
    return PASSAGES


@pytest.fixture(scope="session")
def encoder_folder(benchmark_script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmark_script.bag_of_words(tmp_path_factory.mktemp("encoder"), PASSAGES)


class Counting:
    """BM25 that records the number of queries of each search, and fails on request."""

    def __init__(self) -> None:
        self.index = BM25Index(PASSAGES)
        self.sizes: list[int] = []
        self.failures = 0

    def search(self, queries, k=5):
        self.sizes.append(len(queries))
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the disk is gone")
        return self.index.search(queries, k)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def server(counting: Counting) -> Iterator[RetrievalServer]:
    with RetrievalServer(counting, Health(status="ok", passages=5, search="bm25")) as running:
        yield running
