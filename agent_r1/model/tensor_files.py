"""Tensors in several safetensors files: each file holds some rows of the tensors.

    trainer-00001-of-00002.safetensors   rows 0 to 4 of a tensor of shape (9, 3)
    trainer-00002-of-00002.safetensors   rows 5 to 8

A file without the header ``ROWS`` holds whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agent_r1.core.errors import AgentR1Error

ROWS = "rows"
"""A key in the header of a tensor file. The JSON value of the key is {"name of a tensor": [first, total]}, with one
entry for each tensor that is divided among several files. The file holds successive rows of the divided tensor. The
number ``first`` is the index that the first row in the file has in the whole tensor. The number ``total`` is the number
of rows of the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some successive rows of a tensor.

    Attributes:
        first: the index of the first of these rows in the whole tensor.
        total: the number of rows of the whole tensor.
    """

    tensor: Tensor
    first: int
    total: int


def write_rows(path: Path, divided: Mapping[str, Rows], whole: Mapping[str, Tensor]) -> None:
    """Write tensors to one safetensors file. Raise AgentR1Error if the file cannot be written.

    Args:
        divided: {name: rows for this file} of each tensor that is divided among several files.
        whole: {name: tensor} of each complete tensor.
    """
    header = json.dumps({name: [rows.first, rows.total] for name, rows in divided.items()})
    tensors = {**whole, **{name: rows.tensor for name, rows in divided.items()}}
    try:
        save_file({name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}, path, {ROWS: header})
    except (OSError, SafetensorError) as error:
        raise AgentR1Error(f"{path} could not be written: {error}") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a tensor that one file contains: some successive rows.

    Attributes:
        first: the index of the part's first row in the whole tensor.
        total: the number of rows of the whole tensor.
        shape: the shape of the part.
    """

    file: Path
    first: int
    total: int
    shape: tuple[int, ...]


class TensorFiles(Mapping[str, Tensor]):
    """A mapping from names to the tensors in ``files``. A tensor is read each time it is looked up.

    Raise SafetensorError or OSError if a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._parts: dict[str, list[_Part]] = {}
        for file in self.files:
            with safe_open(file, "pt") as opened:
                divided = json.loads((opened.metadata() or {}).get(ROWS, "{}"))
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    shape = tuple(opened.get_slice(name).get_shape())
                    first, total = divided.get(name, (0, shape[0] if shape else 1))
                    self._parts.setdefault(name, []).append(_Part(file, first, total, shape))

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name][0]
        if part.shape:
            return self.rows(name, 0, part.total)
        with safe_open(part.file, "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor ``name``."""
        part = self._parts[name][0]
        return (part.total, *part.shape[1:]) if part.shape else ()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read and return the rows ``start`` to ``stop - 1`` of the tensor ``name``."""
        found = []
        for part in sorted(self._parts[name], key=lambda part: part.first):
            begin = min(max(start - part.first, 0), part.shape[0])
            end = min(max(stop - part.first, begin), part.shape[0])
            with safe_open(part.file, "pt") as opened:
                found.append(opened.get_slice(name)[begin:end])
        rows: Tensor = torch.cat(found)
        return rows
