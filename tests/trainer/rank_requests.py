"""Requests to ranks, in a module that ranks can import."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from agent_r1.core.errors import InvalidInput


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
