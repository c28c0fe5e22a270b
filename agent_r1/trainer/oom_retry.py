"""What happens when memory runs out in the middle of an update: it is begun again in smaller portions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from agent_r1.core.errors import AgentR1Error
from agent_r1.data.micro_batches import micro_batches
from agent_r1.data.sequences import TokenSequence

T = TypeVar("T")

Block = Sequence[TokenSequence]

SAID = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(AgentR1Error):
    """An update does not fit in memory, in its smallest portions either; says how large it was."""


class Budget:
    """How many ``tokens`` a forward and backward pass may hold.

    Where memory runs out, the work is begun again with half of what its largest pass held, and so are all later ones.
    Shares of a loss are over the whole batch, so nothing but the order of its sums changes.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def spend(self, work: Callable[[int], T], blocks: Sequence[Block], undo: Callable[[], None]) -> T:
        """``work(tokens)`` over these blocks, none of which is divided; ``undo`` clears what it left half done.

        Raises OutOfMemory where a pass of one block is still too much.
        """
        while isinstance(done := _attempted(work, self.tokens), _RanOut):
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            held, largest = _held(blocks, self.tokens), max(_held([block], self.tokens) for block in blocks)
            if held <= largest:
                raise OutOfMemory(
                    f"memory ran out in passes of {self.tokens} tokens, the longest sequence alone has {largest}: "
                    f"{done.said}; lower --context or --max_tokens, or take a smaller model"
                )
            self.tokens = held // 2
        return done


def _held(blocks: Sequence[Block], tokens: int) -> int:
    """Tokens of the largest pass, padding included."""
    return max(micro.ids.numel() for micro in micro_batches(blocks, tokens))


@contextmanager
def telling(of: str) -> Iterator[None]:
    """Where memory runs out inside all the same, as in an optimizer's step, OutOfMemory says ``of`` what."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        raise OutOfMemory(
            f"memory ran out in {of}: {_first_line(error)}; take a smaller model or more memory"
        ) from error


class _RanOut:
    """Memory ran out. A value and no exception, which would keep alive the very tensors that fill the memory."""

    def __init__(self, said: str) -> None:
        self.said = said


def _attempted(work: Callable[[int], T], tokens: int) -> T | _RanOut:
    try:
        return work(tokens)
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        return _RanOut(_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _is_memory(error: RuntimeError | MemoryError) -> bool:
    """torch has a type for a GPU's memory; its CPU allocator and cuBLAS raise a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in SAID)
