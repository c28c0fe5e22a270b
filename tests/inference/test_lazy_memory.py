"""Lazy tensors take memory only for the part that was written, and give it back."""

from __future__ import annotations

import sys
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from memory_maps import resident_bytes

from agent_r1.inference.kv_cache import give_back, lazy_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/pagemap of Linux")

MIB = 2**20


def test_only_the_part_that_was_written_takes_memory() -> None:
    tensor = lazy_zeros((4, 64, MIB), torch.float32)  # 1 GiB
    assert resident_bytes(tensor) == 0
    tensor[1, 5, : MIB // 2] = 1.0
    assert 2 * MIB <= resident_bytes(tensor) <= 2 * MIB + 2 * PAGESIZE
    assert tensor.shape == (4, 64, MIB) and float(tensor[1, 5].sum()) == MIB // 2 and float(tensor[1, 6].sum()) == 0


def test_a_tensor_can_be_larger_than_the_memory_of_the_machine() -> None:
    pages = next(line for line in Path("/proc/meminfo").read_text("utf-8").splitlines() if line.startswith("MemTotal"))
    kib = int(pages.split()[1])
    tensor = lazy_zeros((2 * kib, 1024), torch.uint8)
    tensor[-1, -1] = 7
    assert int(tensor[-1].sum()) == 7 and resident_bytes(tensor[-1]) <= 2 * PAGESIZE


def test_memory_that_is_given_back_is_free_and_other_parts_keep_their_values() -> None:
    tensor = lazy_zeros((3, MIB + 100), torch.bfloat16).fill_(1.0)  # the rows share pages at their ends
    give_back(tensor[1])
    assert 4 * MIB <= resident_bytes(tensor) <= 4 * MIB + 3 * PAGESIZE
    assert bool((tensor[0] == 1).all() and (tensor[2] == 1).all()) and int(tensor[1].count_nonzero()) <= 2 * PAGESIZE
    tensor[1] = 2.0
    assert bool((tensor[1] == 2).all())
