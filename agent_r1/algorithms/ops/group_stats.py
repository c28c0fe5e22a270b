"""Group-relative statistics: baselines and scales for advantage estimators without a critic.

``x`` (N,) are returns. Elements with the same ``key`` (N,) are a group, whose elements are compared with each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_r1.data.segments import segment_count, segment_mean, segment_sum

MIN_STD = 1e-6
"""A group with at most this standard deviation counts as constant: rounding errors must not become advantages."""


def group_std(x: Tensor, key: Tensor) -> Tensor:
    """Return, for each element, the sample standard deviation (Bessel) of its group: (N,). In a group of 1, it is 0.

    ``x`` (N,) holds the elements, and ``key`` (N,) the group of each element.
    """
    deviations = x - segment_mean(x, key)[key]  # (N,)
    return (segment_sum(deviations.square(), key) / (segment_count(key) - 1).clamp(min=1)).sqrt()[key]


def has_variance(x: Tensor, key: Tensor) -> Tensor:
    """Return, for each element, whether the standard deviation of its group is above ``MIN_STD``: (N,) bool.

    ``x`` (N,) holds the elements, and ``key`` (N,) the group of each element.
    """
    return group_std(x, key) > MIN_STD


def center(x: Tensor, key: Tensor) -> Tensor:
    """Return each element minus the mean of its group: (N,). This is the advantage of Dr.GRPO (2503.20783).

    ``x`` (N,) holds the elements, and ``key`` (N,) the group of each element. If all elements of a group are equal, the
    result is exactly 0 in this group.
    """
    return torch.where(has_variance(x, key), x - segment_mean(x, key)[key], 0.0)


def leave_one_out(x: Tensor, key: Tensor) -> Tensor:
    """Return each element minus the mean of the other elements of its group: (N,).

    ``x`` (N,) holds the elements, and ``key`` (N,) the group of each element. If all elements of a group are equal, the
    result is exactly 0 in this group. This is the advantage of RLOO (2402.14740).
    """
    # x - mean of the other elements = (x - mean of the group) * count / (count - 1)
    count = segment_count(key)[key]  # (N,)
    return center(x, key) * count / (count - 1).clamp(min=1)


def center_weighted(x: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return each element minus the weighted mean of its group: (N,).

    ``x`` (N,) holds the elements, ``key`` (N,) the group of each element, and ``weight`` (N,) its weight in the mean.
    If all elements of a group are equal, the result is exactly 0 in this group. If the weight is the length of a
    trajectory, the result is the advantage of OPO (2505.23585).
    """
    mean = segment_sum(weight * x, key) / segment_sum(weight, key)  # (groups,)
    return torch.where(has_variance(x, key), x - mean[key], 0.0)


def divide_by_std(advantage: Tensor, x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return advantage / (standard deviation of x in the group + epsilon): (N,). An advantage of 0 stays 0.

    ``advantage`` (N,) holds the elements to divide, ``x`` (N,) the elements whose deviation is computed, such as
    returns, and ``key`` (N,) the group of each element.
    """
    return torch.where(advantage != 0, advantage / (group_std(x, key) + epsilon), 0.0)


def divide_by_mean(advantage: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Return advantage / (mean of x in the group): (N,). This is the scale of MaxRL (2602.02710).

    ``advantage`` (N,) holds the elements to divide, ``x`` (N,) the elements whose mean is computed, such as returns,
    and ``key`` (N,) the group of each element. If the mean of x in a group is at most ``MIN_STD``, the result is 0 in
    this group.
    """
    mean = segment_mean(x, key)[key]  # (N,)
    return torch.where(mean > MIN_STD, advantage / mean.clamp(min=MIN_STD), 0.0)


def standardize(x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return (x - mean x) / (std x + epsilon) for each element: (N,).

    The mean and the std are over the group of the element. ``key`` (N,) holds the group of each element. If all
    elements of a group are equal, the result is exactly 0 in this group. This is the group-relative advantage of GRPO
    (2402.03300, section 4.1.2).
    """
    return divide_by_std(center(x, key), x, key, epsilon)


def whiten(x: Tensor) -> Tensor:
    """Return ``x`` (N,), shifted and scaled to mean 0 and standard deviation 1 (Bessel): (N,).

    If all elements are equal, the result is 0. 1e-8 is added to the standard deviation.
    """
    return standardize(x, torch.zeros_like(x, dtype=torch.int64), 1e-8)


def marginal_maximum(x: Tensor, key: Tensor, k: int | None = None) -> Tensor:
    """Return the mean amount A_i by which each element i raises the maximum of k elements of its group: (N,).

        A_i = sum over S of (max S - max of S without i) / (number of subsets of k elements of the group)

    The sum is over all subsets S of k elements of the group that contain i. ``key`` (N,) holds the group of each
    element. A_i is the gradient weight of PKPO with the baseline of k - 1 elements (2505.15201, equation 33).

    If k is None or above the size of the group, k is the size of the group. Then A_i of the best element is the
    difference between the best and the second best element, and all other A_i are 0 (2503.19595).

    Example:
        marginal_maximum(tensor([3.0, 1.0, 0.0]), tensor([0, 0, 0])) is [2, 0, 0]
    """
    advantage = torch.zeros_like(x)
    for unit in key.unique():
        places = (key == unit).nonzero().squeeze(1)  # (n,) the positions of the elements of the group
        ordered, order = x[places].sort()  # (n,) ascending
        n = len(ordered)
        size = min(k or n, n)
        if size < 2:
            continue  # the group has one element
        # In ascending order, let element i be the best of a subset, and element j < i the second best. The other
        # size - 2 elements of the subset are below element j. There are j elements below element j.
        subsets = torch.tensor([math.comb(j, size - 2) for j in range(n)], dtype=x.dtype)  # (n,)
        lead = (ordered[:, None] - ordered[None, :]).tril()  # (n, n) x_i - x_j for j < i
        advantage[places[order]] = lead @ subsets / math.comb(n, size)
    return torch.where(has_variance(x, key), advantage, 0.0)
