"""Discounted returns and generalized advantage estimation (GAE) over the elements of each unit.

``unit`` (N,) is the number of the trajectory or turn of each element. The elements of a unit are contiguous and in the
order of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.data.segments import segment_last

RETURN_TOLERANCE = 1e-9
"""Tolerance for comparing returns, so that rounding errors of a sum do not decide whether a trajectory is a success."""


def reaches(returns: Tensor, threshold: float) -> Tensor:
    """Return whether each of M returns is at least ``threshold``, up to ``RETURN_TOLERANCE``: (M,) bool."""
    return returns > threshold - RETURN_TOLERANCE


def discounted_sums(x: Tensor, unit: Tensor, discount: float | Tensor) -> Tensor:
    """Return the discounted sums y_t = x_t + discount * y_{t+1}, from each element to the end of its unit: (N,).

    y_t of the last element of a unit is x_t.

    Args:
        x: (N,) rewards, or temporal-difference errors.
        unit: (N,) the number of the turn or trajectory of each element.
        discount: One number, or one number per element (N,) that is equal for all elements of a unit.
    """
    # Doubling: after k rounds, total_t is the discounted sum of the elements t .. t + 2^k - 1, and factor is
    # discount^(2^k). The loop has log2(length of the longest unit) rounds. A loop over time would have one round per
    # element.
    total = x.clone()
    factor = torch.as_tensor(discount, dtype=x.dtype).expand(len(x))
    remaining = segment_last(unit)[unit] - torch.arange(len(x))  # (N,) number of later elements of the unit
    reach = 1
    while bool((remaining >= reach).any()):
        earlier = (remaining >= reach).nonzero().squeeze(1)
        later = earlier + reach
        total = total.index_add(0, earlier, factor[later] * total[later])  # the sum of twice as many elements
        factor = factor.square()
        reach *= 2
    return total


def generalized_advantages(
    rewards: Tensor, values: Tensor, final_values: Tensor, unit: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return the generalized advantage estimate A_t (GAE) of each element: (N,). Source: 1506.02438, equation 16.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}

    Args:
        rewards: (N,) r_t, the reward of each element.
        values: (N,) V_t, the value of the state before each element.
        final_values: (units,) The value of the state after the last element of each unit: 0 if the episode terminated,
            the critic's value if the episode was truncated.
        unit: (N,) the number of the turn or trajectory of each element.
        gamma: The discount.
        lam: lambda: one number, or one number per element (N,) that is equal for all elements of a unit.
    """
    next_values = values.roll(-1).index_put((segment_last(unit),), final_values)  # (N,) V_{t+1}
    deltas = rewards + gamma * next_values - values  # (N,) delta_t
    return discounted_sums(deltas, unit, gamma * lam)
