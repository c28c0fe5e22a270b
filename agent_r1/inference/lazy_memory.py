"""Tensors on a CPU that take memory only for the part that was written.

The operating system provides the memory page by page, when a page is first written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_LINUX_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux. Without this flag, Linux refuses tensors that are larger than the memory."""

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def has_free_addresses() -> bool:
    """Return whether this process may reserve an address space that is larger than the machine's memory.

    Two settings can forbid this: a limit on the address space (``ulimit -v``), and ``vm.overcommit_memory`` 2.
    """
    counts_all = OVERCOMMIT.exists() and OVERCOMMIT.read_text("ascii").strip() == "2"
    return not counts_all and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in CPU memory. Each page of memory is taken on its first write.

    All numbers in ``shape`` must be positive. Raise OSError if the system refuses an address space of this size.
    """
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags | (_LINUX_NORESERVE if sys.platform == "linux" else 0))
    if sys.platform == "linux":
        with suppress(OSError):  # this kernel has no huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page takes 2 MiB for the first byte that is written
    return torch.frombuffer(memory, dtype=dtype).view(*shape)  # keeps ``memory`` open


def give_back(part: Tensor) -> None:
    """Give the memory of ``part``, a contiguous part of a lazy tensor, back to the operating system.

    Afterwards, each value in the part is either zero or unchanged.
    """
    assert part.is_contiguous()
    begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
