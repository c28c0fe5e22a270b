"""Agreement of the ranks about memory: if memory runs out on one rank, all ranks repeat the pass.

A rank is one of the processes that compute together. FSDP exchanges tensors between the ranks before and after each
layer, and an exchange needs all ranks. So a rank whose memory runs out in a micro-batch must still take part in the
later exchanges of the micro-batch. For this purpose, the rank runs the micro-batch again with a single padding token
instead of the real tokens. Then all ranks drop the gradients of the pass, and repeat the pass in smaller micro-batches.
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
from agent_r1.trainer.oom_retry import FreedMemory, RanOut, explain_oom, first_line, is_oom

T = TypeVar("T")


class PassAborted(Exception):
    """Raised after a micro-batch if memory ran out on another rank."""

    def __init__(self, failure: RanOut) -> None:
        super().__init__(failure.message)
        self.failure = failure


class MemoryAgreement:
    """Lets all ranks know, after each micro-batch of a pass, whether memory ran out on one of the ranks."""

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
        """Yield each micro-batch, copied to the device of the models. All ranks need the same number of micro-batches.

        After each micro-batch, raise PassAborted if memory ran out on another rank.
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
            work: runs a pass over the micro-batches that :meth:`micro_batches` yields.
            work_on_padding: runs the pass over a single padding token. This function is called if memory ran out on
                this rank. The other ranks cannot finish their micro-batch unless this rank exchanges tensors with them.

        Raises:
            OutOfMemory: memory ran out between two micro-batches, or in ``work_on_padding``. The caller then has to end
                all ranks.
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
        for root in self._called:
            assert isinstance(root, nn.Module)
            root.zero_grad(set_to_none=True)  # while whole weights, with their gradients, are in the modules
            assert isinstance(root, FSDPModule)
            root.reset_iter_state()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _find_failure(message: str | None) -> RanOut | None:
    # All ranks must call this function together.
    failed = torch.tensor(-1 if message is None else dist.get_rank())
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    rank = int(failed)
    if rank < 0:
        return None
    messages = [message]
    dist.broadcast_object_list(messages, rank, device=torch.device("cpu"))
    return RanOut(f"rank {rank} of the trainer: {messages[0]}")


class _Exchanges:
    """A counter of the exchanges of tensors between the ranks in one micro-batch."""

    def __init__(self) -> None:
        self._count = self._left_out = 0

    def begin(self) -> None:
        self._count = self._left_out = 0

    def repeat(self) -> None:
        self._count, self._left_out = 0, self._count

    def run(self, exchange: Callable[[], Any], output: Tensor) -> Any:
        # If the exchange must be skipped (see the class), write zeros to ``output`` and return None.
        is_left_out = self._count < self._left_out
        result = None if is_left_out else exchange()
        if is_left_out:
            output.zero_()
        self._count += 1
        return result


class _AllGather(DefaultAllGather):
    """FSDP's exchange of weights between the ranks."""

    def __init__(self, exchanges: _Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(self, output_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return self._exchanges.run(partial(super().__call__, output_tensor, *arguments, **options), output_tensor)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP's exchange of gradients between the ranks."""

    def __init__(self, exchanges: _Exchanges) -> None:
        self._exchanges = exchanges

    def __call__(self, output_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        return self._exchanges.run(partial(super().__call__, output_tensor, *arguments, **options), output_tensor)
