"""Agreement of the ranks about memory: if memory runs out on one rank, all ranks repeat the pass.

FSDP exchanges tensors between the ranks before and after each layer. If a rank stopped in the middle of a micro-batch,
the other ranks would wait for its tensors forever. So a rank whose memory runs out takes part in the remaining
exchanges of the micro-batch, with a micro-batch of one token. After each micro-batch, the ranks tell each other whether
their memory sufficed. If memory ran out on one rank, all ranks drop the gradients of the pass, and repeat the pass in
smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from agent_r1.data.micro_batches import MicroBatch
from agent_r1.trainer.allocator import FreedMemory
from agent_r1.trainer.oom_retry import RanOut, explain_oom, first_line, is_oom

T = TypeVar("T")


class PassAborted(Exception):
    """Raised in a pass after a micro-batch in which memory ran out on another rank."""

    def __init__(self, failure: RanOut) -> None:
        super().__init__(failure.message)
        self.failure = failure


class MemoryAgreement:
    """The agreement of all ranks, after each micro-batch of a pass, on whether memory sufficed.

    Args:
        roots: the sharded modules that the passes call.
        device: the device of the micro-batches.
    """

    def __init__(self, roots: Collection[nn.Module], device: torch.device) -> None:
        self._device = device
        self._exchanges = _Exchanges()
        self._freed_memory = FreedMemory()
        self._called: set[nn.Module] = set()  # the roots that FSDP has prepared for passes
        self._in_micro_batch = False
        for root in roots:
            root.register_forward_pre_hook(lambda module, _: self._called.add(module), prepend=True)
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(_AllGather(self._exchanges))
                    module.set_custom_reduce_scatter(_ReduceScatter(self._exchanges))

    def micro_batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device of the models. All ranks need the same number of micro-batches.

        After each micro-batch, ask the other ranks whether their memory sufficed.

        Raises:
            PassAborted: memory ran out on another rank in the last micro-batch.
        """
        for micro in micro_batches:
            self._exchanges.begin()
            self._in_micro_batch = True
            yield micro.to(self._device)
            self._in_micro_batch = False
            failure = _find_failure(None)
            if failure is not None:
                raise PassAborted(failure)

    def run(self, work: Callable[[], T], work_on_padding: Callable[[], object]) -> T | RanOut:
        """Return the result of ``work()``. If memory ran out in a micro-batch of any rank, return RanOut on all ranks.

        Args:
            work: runs a pass over :meth:`micro_batches`.
            work_on_padding: runs the pass over one micro-batch of padding. It is called if memory ran out on this
                rank. The other ranks still wait for tensors of this rank in their present micro-batch, and the pass
                over padding sends tensors of the right shapes.

        Raises:
            OutOfMemory: memory ran out between two micro-batches, or in ``work_on_padding``. The other ranks then wait
                for this rank, so the caller has to end all ranks.
        """
        with explain_oom(f"rank {dist.get_rank()} of the trainer"):
            try:
                result = work()
                self._freed_memory.give_back()
                return result
            except PassAborted as aborted:
                return aborted.failure
            except (RuntimeError, MemoryError) as error:
                if not (self._in_micro_batch and is_oom(error)):
                    raise
                message = first_line(error)
            # not in the except block, because the traceback of the error keeps the tensors of the micro-batch
            self._in_micro_batch = False
            self._reset()
            self._exchanges.repeat()
            work_on_padding()
            failure = _find_failure(message)
            assert failure is not None
            return failure

    def _reset(self) -> None:
        """Drop the gradients of an interrupted pass, and make the models ready for another pass."""
        for root in self._called:
            assert isinstance(root, nn.Module)
            root.zero_grad(set_to_none=True)  # while whole weights, with their gradients, are in the modules
            assert isinstance(root, FSDPModule)
            root.reset_iter_state()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _find_failure(message: str | None) -> RanOut | None:
    """Return the failure of a rank whose memory ran out, or None if memory sufficed on all ranks.

    All ranks must call this function together, and get the same result. If memory ran out on several ranks, the result
    is the failure of the rank with the highest number. ``message`` is the error of this rank; None if its memory
    sufficed.
    """
    failed = torch.tensor(-1 if message is None else dist.get_rank())
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    rank = int(failed)
    if rank < 0:
        return None
    messages = [message]
    dist.broadcast_object_list(messages, rank, device=torch.device("cpu"))
    return RanOut(f"rank {rank} of the trainer: {messages[0]}")


class _Exchanges:
    """A counter of the exchanges of tensors between ranks in a micro-batch.

    If memory runs out on this rank, only this rank begins the micro-batch again. The exchanges that this rank has
    completed before are then skipped, because the other ranks do not repeat these exchanges.
    """

    def __init__(self) -> None:
        self._count = self._left_out = 0

    def begin(self) -> None:
        """Set the number of counted exchanges to 0. All ranks call this method when they begin a micro-batch."""
        self._count = self._left_out = 0

    def repeat(self) -> None:
        """Record that only this rank begins its micro-batch again, from exchange 0.

        The exchanges that it had completed before are now skipped (see :class:`_Exchanges`).
        """
        self._count, self._left_out = 0, self._count

    def run(self, exchange: Callable[[], Any], output: Tensor) -> Any:
        """Run an exchange of tensors, which writes its result to ``output``. Return ``exchange()``.

        If this rank repeats the micro-batch and has already taken part in this exchange, do not run the exchange. Then
        write zeros to ``output``, and return None.
        """
        is_left_out = self._count < self._left_out
        result = None if is_left_out else exchange()
        if is_left_out:
            output.zero_()
        self._count += 1
        return result


class _AllGather(DefaultAllGather):
    """The exchange that collects the parts of a layer's weights from all ranks, counted by ``exchanges``."""

    def __init__(self, exchanges: _Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(self, output_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return self._exchanges.run(partial(super().__call__, output_tensor, *arguments, **options), output_tensor)


class _ReduceScatter(DefaultReduceScatter):
    """The exchange that sums the gradients of a layer over all ranks, counted by ``exchanges``."""

    def __init__(self, exchanges: _Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(self, output_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return self._exchanges.run(partial(super().__call__, output_tensor, *arguments, **options), output_tensor)
