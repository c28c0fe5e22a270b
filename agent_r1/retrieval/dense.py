"""Dense search: the passages are ranked by the inner product of the passage's vector and the query's vector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from agent_r1.core.errors import InvalidInput
from agent_r1.model.encoder import SentenceEncoder, load_encoder
from agent_r1.retrieval.config import IndexConfig
from agent_r1.retrieval.retriever import TOP_K, Found, Origin, Passage, build_vectors, corpus_checksum

CHUNK = 65536
"""The number of vectors that are scored, or added to a faiss index, at a time."""


class Vectors(Protocol):
    """Vectors that can be searched by inner product."""

    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        """Return, for each query, the indices of the ``k`` vectors with the largest inner products, largest first."""
        ...


class TorchVectors:
    """An exact search over the rows of ``matrix``. The matrix is float32, (vectors, width), and can be a memory map.

    Vectors of equal score come in the order of their indices.
    """

    def __init__(self, matrix: np.ndarray, device: str) -> None:
        self._matrix = torch.from_numpy(matrix).to(device)

    @torch.inference_mode()
    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        query = torch.from_numpy(queries).to(self._matrix.device)  # (n, width)
        numbers = torch.empty((len(queries), 0), dtype=torch.int64, device=query.device)
        for start in range(0, len(self._matrix), CHUNK):
            scores = query @ self._matrix[start : start + CHUNK].T  # (n, chunk)
            best = scores.topk(min(k, scores.shape[1]), dim=1).indices + start
            numbers = torch.cat([numbers, best], dim=1)  # (n, candidates)
        # A matrix product can round the scores of equal vectors differently, because the vectors have different
        # positions in the matrix. The candidates are scored again one by one: then equal vectors have equal scores, and
        # the vector with the lower number comes first.
        numbers = numbers.sort(dim=1).values
        scores = (query[:, None, :] * self._matrix[numbers]).sum(dim=2)  # (n, candidates)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        return numbers.gather(1, order)[:, :k].tolist()


class FaissVectors:
    """A search with a faiss index. The factory string determines whether the search is exact."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        _, numbers = self._index.search(queries, k)
        # faiss fills the row with -1 if it finds fewer than k vectors
        return [[number for number in row if number >= 0] for row in numbers.tolist()]


def build_faiss(matrix: np.ndarray, factory: str) -> Any:
    """Return a faiss index over the rows of ``matrix``, trained on ``matrix`` if the index needs training.

    Raises InvalidInput if faiss is not installed or refuses the factory string for this matrix.
    """
    faiss = import_faiss()
    try:
        index = faiss.index_factory(matrix.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(matrix)
        for start in range(0, len(matrix), CHUNK):
            index.add(np.ascontiguousarray(matrix[start : start + CHUNK]))
    except RuntimeError as error:
        got = f"{factory!r} ({str(error).splitlines()[0][-160:]})"
        raise InvalidInput("faiss", got=got, do="give a factory string that suits the number of passages") from error
    return index


def read_faiss(path: Path, probes: int) -> FaissVectors:
    """Load a faiss index from a file.

    An IVF index divides its vectors into clusters. For each query, only the nearest ``probes`` clusters are searched.
    """
    faiss = import_faiss()
    index = faiss.read_index(str(path))
    if isinstance(index, faiss.IndexIVF):
        index.nprobe = probes
    return FaissVectors(index)


def import_faiss() -> Any:
    """Import and return faiss. Raises InvalidInput if faiss is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidInput("faiss", got="no such package", do="pip install 'agent-r1[faiss]'") from error
    return faiss


VECTORS, INDEX = "vectors.npy", "index.faiss"

ENCODED_AT_ONCE = 8192


class DenseIndex:
    """A search over passages by their vectors. Vector i belongs to passage i.

    A search returns the ``k`` nearest passages, even if no passage is relevant. With a faiss index, it can return fewer
    passages.
    """

    def __init__(
        self, passages: Sequence[Passage], encoder: SentenceEncoder, vectors: Vectors, query_prefix: str = ""
    ) -> None:
        self.passages = tuple(passages)
        self._encoder, self._vectors, self._query_prefix = encoder, vectors, query_prefix

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        if not queries:
            return []
        query_vectors = self._encoder.encode([self._query_prefix + query for query in queries])
        nearest = self._vectors.nearest(query_vectors, min(k, len(self.passages)))
        return [tuple(self.passages[number] for number in row) for row in nearest]


def open_dense(config: IndexConfig, passages: Sequence[Passage]) -> DenseIndex:
    """Return a dense index over ``passages``. Vectors and faiss indexes are cached in ``config.cache``.

    Raises InvalidInput if the encoder cannot be loaded, the cache cannot be written, or faiss is missing or refuses the
    factory string.
    """
    if config.faiss:
        import_faiss()  # raises before the passages are encoded, which can take an hour
    encoder = load_encoder(config.encoder, config.pooling, config.max_tokens, config.batch, config.device)
    origin = Origin(corpus_checksum(passages), encoder.fingerprint(), config.passage_prefix, factory="")
    folder = build_vectors(config.cache, origin, partial(_write_vectors, passages, encoder, config.passage_prefix))
    if config.faiss:
        indexed = Origin(origin.passages, origin.encoder, origin.passage_prefix, config.faiss)
        made = build_vectors(config.cache, indexed, partial(_write_index, folder / VECTORS, config.faiss))
        return DenseIndex(passages, encoder, read_faiss(made / INDEX, config.probes), config.query_prefix)
    vectors = TorchVectors(_mapped(folder / VECTORS), str(encoder.model.device))
    return DenseIndex(passages, encoder, vectors, config.query_prefix)


def _write_vectors(passages: Sequence[Passage], encoder: SentenceEncoder, prefix: str, folder: Path) -> None:
    shape = (len(passages), encoder.width)
    vectors = np.lib.format.open_memmap(folder / VECTORS, mode="w+", dtype=np.float32, shape=shape)
    for start in range(0, len(passages), ENCODED_AT_ONCE):
        some = passages[start : start + ENCODED_AT_ONCE]
        vectors[start : start + len(some)] = encoder.encode([prefix + passage.indexed_text for passage in some])
    vectors.flush()


def _write_index(vectors: Path, factory: str, folder: Path) -> None:
    import_faiss().write_index(build_faiss(_mapped(vectors), factory), str(folder / INDEX))


def _mapped(vectors: Path) -> np.ndarray:
    # For a read-only map, torch would print a warning.
    return np.load(vectors, mmap_mode="c", allow_pickle=False)
