"""Which vectors have the largest inner product with others: exactly in torch, or by an index of faiss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from agent_r1.core.errors import InvalidInput

CHUNK = 65536
"""Vectors that are compared, or handed to faiss, at a time."""


class Vectors(Protocol):
    """Vectors, numbered from 0, that can be searched."""

    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        """For each row of ``queries``, (n, width) float32, the numbers of at most ``k`` vectors, best first."""
        ...


class TorchVectors:
    """Exact search over ``matrix``, (vectors, width) float32, which may be mapped from a file."""

    def __init__(self, matrix: np.ndarray, device: str) -> None:
        self._matrix = torch.from_numpy(matrix).to(device)

    @torch.inference_mode()
    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        asked = torch.from_numpy(queries).to(self._matrix.device)
        scores = torch.empty((len(queries), 0), device=asked.device)
        numbers = torch.empty((len(queries), 0), dtype=torch.int64, device=asked.device)
        for start in range(0, len(self._matrix), CHUNK):
            chunk = asked @ self._matrix[start : start + CHUNK].T
            best = chunk.topk(min(k, chunk.shape[1]), dim=1)
            scores = torch.cat([scores, best.values], dim=1)
            numbers = torch.cat([numbers, best.indices + start], dim=1)
        return _ranked(scores, numbers, k).tolist()


def _ranked(scores: torch.Tensor, numbers: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` best numbers of each row, best first; those of equal score in their own order."""
    numbers, places = numbers.sort(dim=1)
    order = scores.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return numbers.gather(1, order)[:, :k]


class FaissVectors:
    """Search by an index of faiss, exact or not, as its factory string says."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def nearest(self, queries: np.ndarray, k: int) -> list[list[int]]:
        _, numbers = self._index.search(queries, k)
        return [[number for number in row if number >= 0] for row in numbers.tolist()]  # -1: fewer than k were found


def build_faiss(matrix: np.ndarray, factory: str) -> Any:
    """An index of faiss over ``matrix``, trained on it where its kind needs that. Raises InvalidInput."""
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
    """The index in a file."""
    faiss = import_faiss()
    index = faiss.read_index(str(path))
    if isinstance(index, faiss.IndexIVF):
        index.nprobe = probes
    return FaissVectors(index)


def import_faiss() -> Any:
    """faiss, which is an extra. Raises InvalidInput where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise InvalidInput("faiss", got="no such package", do="pip install 'agent-r1[faiss]'") from error
    return faiss
