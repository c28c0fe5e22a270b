"""Group-relative statistics: the baselines and scales of every estimator that has no critic.

``x`` (N,) are returns; elements with the same ``key`` (N,) are compared with each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count, segment_mean, segment_sum

MIN_STD = 1e-6
"""A group whose standard deviation is not above this counts as constant: float noise must not become an advantage."""


def group_std(x: Tensor, key: Tensor) -> Tensor:
    """Return, per element, the sample standard deviation (Bessel) of its group; 0 in a group of one."""
    deviations = x - segment_mean(x, key)[key]  # (N,)
    return (segment_sum(deviations.square(), key) / (segment_count(key) - 1).clamp(min=1)).sqrt()[key]


def has_variance(x: Tensor, key: Tensor, tolerance: float = MIN_STD) -> Tensor:
    """Return, per element, whether the standard deviation of its group is above ``tolerance``."""
    return group_std(x, key) > tolerance


def center(x: Tensor, key: Tensor) -> Tensor:
    """Return x - mean of its group, the advantage of Dr.GRPO (2503.20783); exactly 0 in a constant group."""
    return torch.where(has_variance(x, key), x - segment_mean(x, key)[key], 0.0)


def leave_one_out(x: Tensor, key: Tensor) -> Tensor:
    """Return x - mean of the others in its group, RLOO's advantage (2402.14740); exactly 0 in a constant group."""
    # x - mean of the others = (x - mean) * count / (count - 1)
    count = segment_count(key)[key]  # (N,)
    return center(x, key) * count / (count - 1).clamp(min=1)


def center_weighted(x: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return x - weighted mean of its group; exactly 0 in a constant group.

    With the lengths as ``weight`` (N,) it is OPO's advantage (2505.23585): the baseline of least variance if the
    squared gradient of a trajectory grows with its length.
    """
    mean = segment_sum(weight * x, key) / segment_sum(weight, key)  # (groups,)
    return torch.where(has_variance(x, key), x - mean[key], 0.0)


def divide_by_std(advantage: Tensor, x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return advantage / (standard deviation of x in the group + epsilon); 0 stays 0."""
    return torch.where(advantage != 0, advantage / (group_std(x, key) + epsilon), 0.0)


def divide_by_mean(advantage: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Divide the advantage by the group's mean of x; 0 if that mean is not positive. MaxRL's scale (2602.02710)."""
    mean = segment_mean(x, key)[key]  # (N,)
    return torch.where(mean > MIN_STD, advantage / mean.clamp(min=MIN_STD), 0.0)


def standardize(x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return (x - mean) / (std + epsilon) of its group; exactly 0 in a constant group.

    It is GRPO's group-relative advantage (2402.03300, section 4.1.2).
    """
    return divide_by_std(center(x, key), x, key, epsilon)


def whiten(x: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return x with mean 0 and standard deviation 1 (Bessel) over all elements; 0 if all are equal."""
    return standardize(x, torch.zeros_like(x, dtype=torch.int64), epsilon)


def marginal_maximum(x: Tensor, key: Tensor, k: int | None = None) -> Tensor:
    """Return by how much each element raises the maximum of k elements of its group; exactly 0 in a constant group.

        A_i = sum over the subsets S of k elements with i of (max S - max of the others in S) / number of subsets of k

    It is PKPO's gradient weight with the baseline of k - 1 (2505.15201, equation 33). The default k is the whole group:
    the best element minus the second best for the best one, 0 for the others (2503.19595).
    """
    advantage = torch.zeros_like(x)
    for unit in key.unique():
        places = (key == unit).nonzero().squeeze(1)  # (n,) the group's elements
        ordered, order = x[places].sort()  # (n,) ascending
        n = len(ordered)
        size = min(k or n, n)
        if size < 2:
            continue  # nothing to compare with
        # i is the best of a subset and j < i the second best: the other k - 2 elements are among the j below j
        subsets = torch.tensor([math.comb(j, size - 2) for j in range(n)], dtype=x.dtype)  # (n,)
        lead = (ordered[:, None] - ordered[None, :]).tril()  # (n, n) x_i - x_j for j < i
        advantage[places[order]] = lead @ subsets / math.comb(n, size)
    return torch.where(has_variance(x, key), advantage, 0.0)
