"""Loss aggregation: the weight of each token, computed once over the whole batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count

Aggregation = Literal["token_mean", "turn_mean", "trajectory_mean", "group_mean", "constant"]


def aggregation_weights(unit: Tensor, aggregation: Aggregation, length: float | None = None) -> Tensor:
    """Return the loss weight of each token: (n,) -> (n,) float64.

    Args:
        unit: (n,) the turn, trajectory or group of each token, as the aggregation asks for.
        aggregation: ``token_mean`` gives every token 1 / n. ``turn_mean``, ``trajectory_mean`` and ``group_mean`` give
            every unit the same weight: 1 / (units * tokens of the unit). ``constant`` is Dr.GRPO's (2503.20783):
            1 / (units * length).
        length: The constant divisor, in tokens.
    """
    if aggregation == "token_mean":
        return torch.full(unit.shape, 1 / len(unit), dtype=torch.float64)
    count = segment_count(unit)  # (units,) tokens of each unit
    units = count.count_nonzero()  # a unit without tokens in the loss has no weight
    if aggregation == "constant":
        return torch.full(unit.shape, 1 / (int(units) * (length or 1.0)), dtype=torch.float64)
    return 1 / (units * count[unit]).double()
