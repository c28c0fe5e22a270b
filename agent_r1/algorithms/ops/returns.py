"""Returns and generalized advantage estimation (GAE) over the elements of each unit.

``unit`` (N,) is the trajectory or turn of each element. Its elements are contiguous and in order of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.data.segments import segment_last

RETURN_TOLERANCE = 1e-9
"""Returns that differ by less than this count as equal: the order of a floating-point sum must not decide a success."""


def reaches(returns: Tensor, threshold: float) -> Tensor:
    """Return which returns are at least ``threshold``, up to rounding: (M,) bool."""
    return returns > threshold - RETURN_TOLERANCE


def discounted_sums(x: Tensor, unit: Tensor, discount: float | Tensor) -> Tensor:
    """Return y_t = x_t + discount * y_{t+1} within each unit, the discounted return to go: (N,) -> (N,).

    Args:
        x: (N,) rewards, or temporal-difference errors.
        unit: (N,) the unit of each element.
        discount: One number, or one per element (N,) that is equal within each unit.
    """
    # Doubling: after k rounds total_t sums the elements t .. t + 2^k - 1, and factor is discount^(2^k).
    # This takes log2(longest unit) vector operations; a loop over time would take one operation per element.
    total = x.clone()
    factor = torch.as_tensor(discount, dtype=x.dtype).expand(len(x))
    remaining = segment_last(unit)[unit] - torch.arange(len(x))  # (N,) elements after this one in its unit
    reach = 1
    while bool((remaining >= reach).any()):
        earlier = (remaining >= reach).nonzero().squeeze(1)
        later = earlier + reach
        total = total.index_add(0, earlier, factor[later] * total[later])  # sum over twice as many elements
        factor = factor.square()
        reach *= 2
    return total


def generalized_advantages(
    rewards: Tensor, values: Tensor, final_values: Tensor, unit: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return generalized advantage estimates, GAE (1506.02438, equation 16): (N,) -> (N,).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}

    Args:
        rewards: (N,) r.
        values: (N,) V of the state before each element.
        final_values: (units,) V of the state after each unit's last element: 0 if the episode ended there, the critic's
            value if it was truncated.
        unit: (N,) the unit of each element.
        gamma: The discount.
        lam: lambda; one number, or one per element (N,) that is equal within each unit.
    """
    next_values = values.roll(-1).index_put((segment_last(unit),), final_values)  # (N,) V_{t+1}
    deltas = rewards + gamma * next_values - values  # (N,) delta_t
    return discounted_sums(deltas, unit, gamma * lam)
