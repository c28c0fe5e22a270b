"""Shares of tokens in the loss: computed once over the whole batch, so that cutting it changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count


def token_mean(unit: Tensor) -> Tensor:
    """Every token weighs the same: 1 / N. (N,) -> (N,) float64."""
    return torch.full(unit.shape, 1 / len(unit), dtype=torch.float64)


def unit_mean(unit: Tensor) -> Tensor:
    """Every unit weighs the same, and within it every token: 1 / (units * tokens of the unit). (N,) -> (N,) float64."""
    count = segment_count(unit)
    return 1 / (count.count_nonzero() * count[unit]).double()


def unit_sum(unit: Tensor, length: float) -> Tensor:
    """Tokens of every unit add up, over a constant: 1 / (units * length). Dr.GRPO (2503.20783)."""
    return torch.full(unit.shape, 1 / (int(segment_count(unit).count_nonzero()) * length), dtype=torch.float64)
