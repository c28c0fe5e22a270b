"""Which memory of this process exists, on Linux."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from torch import Tensor

PRESENT, SWAPPED = 1 << 63, 1 << 62


def resident_bytes(tensor: Tensor) -> int:
    """Return how many bytes of a contiguous tensor are in memory or in swap, in whole pages."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    last = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:  # 8 bytes for each page
        file.seek(8 * first)
        entries = struct.unpack(f"={last - first}Q", file.read(8 * (last - first)))
    return mmap.PAGESIZE * sum(bool(entry & (PRESENT | SWAPPED)) for entry in entries)
