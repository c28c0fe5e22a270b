"""Management of the memory that forward and backward passes use.

Freed memory goes back to the operating system, and a pass that runs out of memory is repeated.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from agent_r1.core.errors import AgentR1Error

T = TypeVar("T")

OOM_MESSAGES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in the RuntimeError that PyTorch's CPU allocator or cuBLAS raises if memory runs out."""

STATM = Path("/proc/self/statm")

KEPT = 2**30
"""The number of bytes by which the process may grow before it gives freed memory back to the operating system.

With a model of 14 million parameters, giving memory back after each pass would take an eighth of a training step.
"""


class OutOfMemory(AgentR1Error):
    """Raised if memory runs out in an update, and smaller micro-batches cannot help."""


class TokenBudget:
    """The maximum number of tokens in a micro-batch (``tokens``), which is lowered each time memory runs out.

    The maximum is never increased. A smaller maximum changes the loss of a batch only by rounding errors.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._freed_memory = FreedMemory()

    def run(self, work: Callable[[int], T], largest: Callable[[int], int], undo: Callable[[], None]) -> T:
        """Return ``work(self.tokens)``. Each time memory runs out, repeat the work with a smaller ``self.tokens``.

        The new ``self.tokens`` is half the size of the largest micro-batch in the failed pass.

        Args:
            work: runs a pass. Its argument is the maximum number of tokens in a micro-batch.
            largest: returns the number of tokens in the largest micro-batch of the pass. Its argument is the maximum
                number of tokens in a micro-batch. The result can be above the maximum, because a block (sequences that
                must be in the same micro-batch) is never divided.
            undo: clears the gradients of a failed pass.

        Raises:
            OutOfMemory: memory ran out, and the largest micro-batch was a single block.
        """
        while True:
            try:
                return work(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                message = first_line(error)
            finally:
                self._freed_memory.give_back()
            # not in the except block, because the traceback of the error keeps the tensors of the pass in memory
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            failed, longest_block = largest(self.tokens), largest(1)  # 1: each block is a micro-batch by itself
            if failed <= longest_block:
                raise OutOfMemory(
                    f"memory ran out in passes of {self.tokens} tokens, the longest sequence alone has "
                    f"{longest_block}: {message}; lower --context or --max_tokens, or take a smaller model"
                )
            self.tokens = failed // 2


@contextmanager
def explain_oom(work: str, do: str = "take a smaller model or more memory") -> Iterator[None]:
    """Raise OutOfMemory if memory runs out in the ``with`` block. Its message has ``work`` and ``do``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise OutOfMemory(f"memory ran out in {work}: {first_line(error)}; {do}") from error


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def is_oom(error: RuntimeError | MemoryError) -> bool:
    known = any(message in str(error) for message in OOM_MESSAGES)
    return known or isinstance(error, MemoryError | torch.OutOfMemoryError)


class FreedMemory:
    """Gives freed memory of the process back to the operating system, if the C library is glibc.

    glibc keeps freed memory, but tensors of new sizes often do not fit into the freed memory. So the process would grow
    with each step: a run of SmolLM2-135M held 20 GB after 16 steps.
    """

    def __init__(self) -> None:
        # bytes that the process held in the beginning, or after the last return
        self._resident = 0 if _malloc_trim() is None else _resident_bytes()

    def give_back(self) -> None:
        """Give freed memory back to the operating system, if the process has grown by more than ``KEPT`` bytes.

        The growth is counted from the last time that memory was given back. Call this method after each pass.
        """
        trim = _malloc_trim()
        if trim is not None and _resident_bytes() > self._resident + KEPT:
            trim(0)  # 0: keep no freed memory at the ends of the heaps
            self._resident = _resident_bytes()


def _resident_bytes() -> int:
    return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim if STATM.exists() else None
    except (OSError, AttributeError):
        return None
