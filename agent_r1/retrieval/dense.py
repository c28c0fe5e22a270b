"""Dense search: the passages are ranked by the inner product of the passage's vector and the query's vector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from agent_r1.model.encoder import SentenceEncoder, load_encoder
from agent_r1.retrieval.cache import Origin, build_vectors
from agent_r1.retrieval.config import IndexConfig
from agent_r1.retrieval.passages import Passage, corpus_checksum
from agent_r1.retrieval.retriever import TOP_K, Found
from agent_r1.retrieval.vectors import TorchVectors, Vectors, build_faiss, import_faiss, read_faiss

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
    """Return the vectors in a file as a copy-on-write memory map. For a read-only map, torch would print a warning."""
    return np.load(vectors, mmap_mode="c", allow_pickle=False)
