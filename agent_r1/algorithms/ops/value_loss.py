"""The loss of a critic."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, target: Tensor, clip: float) -> Tensor:
    """Return PPO's value loss of each state: 0.5 * max((V - G)^2, (V_clipped - G)^2).

    V is the value in ``values``, and G is its target in ``target``. V_clipped is V clipped to [V_old - ``clip``, V_old
    + ``clip``], with V_old from ``old_values``. The result has the shape of ``values``.
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - target).square(), (clipped - target).square())
