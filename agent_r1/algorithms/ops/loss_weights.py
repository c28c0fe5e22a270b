"""Loss aggregation: the weight of each token in the loss, computed once for the whole batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count

Aggregation = Literal["token_mean", "turn_mean", "trajectory_mean", "group_mean", "constant"]


def aggregation_weights(unit: Tensor, aggregation: Aggregation, length: float | None = None) -> Tensor:
    """Return the loss weight of each of n tokens: (n,) float64.

    Args:
        unit: (n,) The number of the turn, trajectory or group of each token, depending on ``aggregation``.
        aggregation: The formula of the weight.
            ``token_mean``: 1 / n.
            ``turn_mean``, ``trajectory_mean``, ``group_mean``: 1 / (number of units * number of tokens of the unit), so
            that all units have equal weight.
            ``constant``: 1 / (number of units * length), as in Dr.GRPO (2503.20783).
            Units without tokens are not counted.
        length: The number ``length`` in the formula of ``constant``, in tokens. The other formulas do not use it.
    """
    if aggregation == "token_mean":
        return torch.full(unit.shape, 1 / len(unit), dtype=torch.float64)
    count = segment_count(unit)  # (units,) tokens of each unit
    units = count.count_nonzero()  # units without tokens in the loss are not counted
    if aggregation == "constant":
        return torch.full(unit.shape, 1 / (int(units) * (length or 1.0)), dtype=torch.float64)
    return 1 / (units * count[unit]).double()


def mean_weights(mask: Tensor) -> Tensor:
    """Return 1 / n for each of the n tokens of ``mask`` (N,), and 0 for all other tokens: (N,) float64."""
    return mask.double() / max(int(mask.sum()), 1)
