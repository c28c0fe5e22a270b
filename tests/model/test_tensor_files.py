"""Tensors in several files: each file has some rows, and a reader takes the rows that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agent_r1.core.errors import AgentR1Error
from agent_r1.model.weights import Rows, TensorFiles, write_rows

MATRIX, VECTOR, STEP = torch.arange(15.0).view(5, 3), torch.tensor([7.0]), torch.tensor(4.0)


def divided(folder: Path) -> TensorFiles:
    """Return the tensors in three files. The third has no row of the vector, the second and third no row at all."""
    parts = [(MATRIX[:2], 0, VECTOR, 0), (MATRIX[2:4], 2, VECTOR[1:], 1), (MATRIX[4:], 4, VECTOR[1:], 1)]
    for number, (rows, first, vector, start) in enumerate(parts):
        whole = {"step": STEP} if number == 0 else {}
        write_rows(folder / str(number), {"m": Rows(rows, first, 5), "v": Rows(vector, start, 1)}, whole)
    return TensorFiles([folder / name for name in "201"])


def test_rows_are_joined_from_the_files_that_have_them(tmp_path: Path) -> None:
    saved = divided(tmp_path)
    assert saved.keys() == {"m", "v", "step"}
    assert saved["m"].equal(MATRIX) and saved["v"].equal(VECTOR) and saved["step"].equal(STEP)
    assert (saved.shape("m"), saved.shape("v"), saved.shape("step")) == ((5, 3), (1,), ())
    for start in range(6):
        for stop in range(start, 6):
            assert saved.rows("m", start, stop).equal(MATRIX[start:stop])


def test_a_file_of_whole_tensors_is_read_in_the_same_way(tmp_path: Path) -> None:
    save_file({"m": MATRIX, "step": STEP}, tmp_path / "whole")
    saved = TensorFiles([tmp_path / "whole"])
    assert saved["m"].equal(MATRIX) and saved["step"].equal(STEP) and saved.rows("m", 1, 4).equal(MATRIX[1:4])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentR1Error, match=r"missing/file could not be written: "):
        write_rows(tmp_path / "missing" / "file", {}, {"step": STEP})
