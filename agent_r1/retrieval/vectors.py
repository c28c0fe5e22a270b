"""Maximum inner product search: exact in torch, or with a faiss index."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from agent_r1.core.errors import InvalidInput

CHUNK = 65536
"""The number of vectors that are scored, or added to a faiss index, at a time."""


class Vectors(Protocol):
    """Vectors that can be searched by inner product."""

    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        """Return, for each query, the indices of the ``k`` vectors with the largest inner products, largest first.

        ``queries`` is float32, (n, width). A list is shorter if fewer vectors are found.
        """
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
        return [
            [number for number in row if number >= 0] for row in numbers.tolist()
        ]  # faiss fills the row with -1 if it finds fewer than k vectors


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
