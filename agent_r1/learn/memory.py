"""What happens when memory runs out in the middle of an update: it is begun again in smaller portions, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from agent_r1.core.errors import AgentR1Error
from agent_r1.learn.microbatches import by_sequence, micro_batches
from agent_r1.learn.sequences import TokenSequence

T = TypeVar("T")


class OutOfMemory(AgentR1Error):
    """An update does not fit in memory, in halved portions either; says how large it was."""


class Budget:
    """How many ``tokens`` a forward and backward pass may hold.

    Where memory runs out, the work is begun again with half of what its largest pass held, and so are all later ones.
    Shares of a loss are over the whole batch, so nothing but the order of its sums changes.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def spend(self, work: Callable[[int], T], sequences: Sequence[TokenSequence], undo: Callable[[], None]) -> T:
        """``work(tokens)`` over these sequences; ``undo`` clears what it left behind half done.

        Raises OutOfMemory where half is still too much.
        """
        done = _attempted(work, self.tokens)
        if not isinstance(done, _RanOut):
            return done
        undo()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        held = max(micro.ids.numel() for micro in micro_batches(by_sequence(sequences), self.tokens))
        self.tokens = max(1, held // 2)
        done = _attempted(work, self.tokens)
        if not isinstance(done, _RanOut):
            return done
        undo()
        longest = max(map(len, sequences))
        raise OutOfMemory(
            f"memory ran out in passes of {self.tokens} tokens, the longest sequence alone has {longest}: {done.said}; "
            "lower --context or --max_tokens, or take a smaller model"
        )


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
        return _RanOut((str(error) or type(error).__name__).splitlines()[0])


def _is_memory(error: RuntimeError | MemoryError) -> bool:
    """torch has a type for a GPU's memory; its CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
