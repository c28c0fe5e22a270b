"""Requests to ranks, in a module that ranks can import."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from agent_r1.core.errors import InvalidInput
from agent_r1.trainer.fsdp import RankTrainer


def rank(_: object) -> int:
    """Return the number of the rank."""
    return dist.get_rank()


def sum_of_ranks(_: object) -> float:
    """Return the sum of the numbers of all ranks."""
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def kill_last_rank(held: object) -> float:
    """Kill the process of the last rank, while the others wait for its number."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_of_ranks(held)


def refuse(_: object) -> None:
    raise InvalidInput("knob", got=3, do="turn it")


def fail_on_last_rank(held: object) -> float:
    """Fail on the last rank, while the others wait for its number."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("no such\ntensor")
    return sum_of_ranks(held)


def die_one_after_another(held: object) -> float:
    """Rank 1 is killed. The error that this is for rank 2 ends its process, as an abort of NCCL does."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return sum_of_ranks(held)
    except RuntimeError:
        if dist.get_rank() == 2:
            os.abort()
        raise


@dataclass(frozen=True)
class RunOutOfMemory:
    """Make memory run out on the last rank: in a layer in the middle of the model, in a pass without a gradient
    ("scoring") or in a half of a training pass."""

    place: Literal["scoring", "forward", "backward"]

    def __call__(self, trainer: RankTrainer) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            trainer._models.policy.get_submodule("transformer.h.1").register_forward_hook(self._after_layer)

    def _after_layer(self, _: object, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self.place == "backward" and output.requires_grad:
            output.register_hook(self._raise)
        elif self.place == ("forward" if torch.is_grad_enabled() else "scoring"):
            self._raise()

    def _raise(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
