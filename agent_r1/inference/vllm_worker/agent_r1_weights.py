"""Weights of a folder, and the checksum of those that were read from it.

vLLM's option ``--worker-extension-cls agent_r1_weights.CheckedWeights`` adds the methods of the class to its workers,
if this folder is on PYTHONPATH.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open

CHECKSUM = "checksum"
"""The name of the file with the checksum of the weights of a folder."""


class ReadWeights:
    """Reads the tensors of all files of a folder, one after the other, and hashes each one that it hands on."""

    def __init__(self, folder: str | Path) -> None:
        self._files = sorted(Path(folder).glob("*.safetensors"))
        self._hashes: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensor = opened.get_tensor(name)
                    head = f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()
                    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                    self._hashes[name] = hashlib.sha256(head + hashlib.sha256(content).digest()).hexdigest()
                    yield name, tensor

    @property
    def checksum(self) -> str:
        """The sha256 of names, types, shapes and bytes of the tensors that were read."""
        return hashlib.sha256(repr(sorted(self._hashes.items())).encode()).hexdigest()


def folder_checksum(folder: Path) -> str:
    """Return the checksum of all weights in a folder."""
    weights = ReadWeights(folder)
    for _ in weights:
        pass
    return weights.checksum


class CheckedWeights:
    """Methods that vLLM adds to its workers. The worker has ``reload_weights``."""

    def load_checked_weights(self, folder: str) -> str:
        """Load the weights in ``folder``, and return the checksum of those that the model took."""
        weights, worker = ReadWeights(folder), cast(Any, self)
        worker.reload_weights(weights_iterator=iter(weights))
        return weights.checksum

    def reports_checksums(self) -> bool:
        """Return true: a server without this class answers with an error."""
        return True
