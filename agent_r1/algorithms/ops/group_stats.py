"""Advantages relative to a group: every estimator without a critic is made of these.

``x`` (N,) are returns, ``key`` (N,) says which are compared with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count, segment_mean, segment_sum

CONSTANT = 1e-6
"""A group whose standard deviation is not above this has no variance: float noise must not become an advantage."""


def deviation(x: Tensor, key: Tensor) -> Tensor:
    """Per element, the sample standard deviation (Bessel) of its group; 0 in a group of one."""
    centred = x - segment_mean(x, key)[key]
    return (segment_sum(centred.square(), key) / (segment_count(key) - 1).clamp(min=1)).sqrt()[key]


def varies(x: Tensor, key: Tensor, tolerance: float = CONSTANT) -> Tensor:
    """Per element, whether its group has any variance; false in a group of one."""
    return deviation(x, key) > tolerance


def center(x: Tensor, key: Tensor) -> Tensor:
    """x - mean of its group; exactly 0 in a group without variance. Dr.GRPO's advantage (2503.20783)."""
    return torch.where(varies(x, key), x - segment_mean(x, key)[key], 0.0)


def leave_one_out(x: Tensor, key: Tensor) -> Tensor:
    """x - mean of the others in its group; exactly 0 in a group without variance. RLOO's advantage (2402.14740)."""
    count = segment_count(key)[key]
    return center(x, key) * count / (count - 1).clamp(min=1)


def center_weighted(x: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """x - weighted mean of its group; exactly 0 in a group without variance.

    With ``weight`` (N,) the lengths it is OPO's advantage (2505.23585): the baseline of least variance where the
    squared gradient of a trajectory grows with its length.
    """
    mean = segment_sum(weight * x, key) / segment_sum(weight, key)
    return torch.where(varies(x, key), x - mean[key], 0.0)


def over_deviation(advantage: Tensor, x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """advantage / (standard deviation of x in the group + epsilon); 0 stays 0."""
    return torch.where(advantage != 0, advantage / (deviation(x, key) + epsilon), 0.0)


def over_mean(advantage: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """advantage / mean of x in the group; 0 where that mean is not positive. MaxRL's scale (2602.02710)."""
    mean = segment_mean(x, key)[key]
    return torch.where(mean > CONSTANT, advantage / mean.clamp(min=CONSTANT), 0.0)


def standardize(x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / (standard deviation + epsilon) of its group; exactly 0 in a group without variance.

    GRPO's advantage (2402.03300, section 4.1.2).
    """
    return over_deviation(center(x, key), x, key, epsilon)


def whiten(x: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and standard deviation 1 (Bessel) over all elements; 0 where all are equal, also where there is one."""
    return standardize(x, torch.zeros_like(x, dtype=torch.int64), epsilon)
