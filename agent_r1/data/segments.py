"""Segment reductions: functions that compute the sum, the mean or the maximum of the elements of each unit.

The elements are tokens or trajectories. The unit of a token is its turn or its trajectory. The unit of a trajectory is
its group. The argument ``unit`` (N,) holds the index of each element's unit. Some functions return indices of elements.
All indices begin with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(unit: Tensor) -> Tensor:
    """Return the number of elements of each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit. Example: [0, 0, 1] -> [2, 1].
    """
    return torch.bincount(unit)


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """Return the sum of the elements of ``x`` (N,) in each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit.
    """
    return x.new_zeros(len(segment_count(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """Return the mean of the elements of ``x`` (N,) in each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit. The mean of a unit without elements is 0.
    """
    return segment_sum(x, unit) / segment_count(unit).clamp(min=1)


def segment_max(x: Tensor, unit: Tensor) -> Tensor:
    """Return the maximum of the elements of ``x`` (N,) in each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit. No element of ``x`` may be negative. The maximum of a unit
    without elements is 0.
    """
    return x.new_zeros(len(segment_count(unit))).scatter_reduce(0, unit, x, "amax")


def segment_last(unit: Tensor) -> Tensor:
    """Return the index of the last element of each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit. Units must be contiguous and not empty.
    """
    return segment_count(unit).cumsum(0) - 1  # (units,) counts of the units 0 .. u, minus 1


def segment_first(unit: Tensor) -> Tensor:
    """Return the index of the first element of each unit (turn, trajectory or group): (units,).

    ``unit`` (N,) holds the index of each element's unit. Units must be contiguous and not empty.
    """
    return segment_last(unit) - segment_count(unit) + 1


def index_within(unit: Tensor) -> Tensor:
    """Return the index of each element among the elements of its unit (turn, trajectory or group): (N,).

    ``unit`` (N,) holds the index of each element's unit. Units must be contiguous and not empty.

    Example:
        index_within(tensor([0, 0, 1, 1, 1])) is [0, 1, 0, 1, 2]
    """
    return torch.arange(len(unit)) - segment_first(unit)[unit]


def previous_within(unit: Tensor) -> Tensor:
    """Return, for each element, the index of the previous element in the same unit, or -1 if there is none: (N,).

    ``unit`` (N,) holds the index of each element's unit. Units must be contiguous and not empty.

    Example:
        previous_within(tensor([0, 0, 1, 1, 1])) is [-1, 0, -1, 2, 3]
    """
    positions = torch.arange(len(unit))  # (N,)
    return torch.where(positions == segment_first(unit)[unit], -1, positions - 1)


def unique_ids(*keys: Tensor) -> Tensor:
    """Return an id, counted from 0, for each index of the tensors ``keys``: (N,).

    Each tensor in ``keys`` is (N,). Two indices i and j have the same id if every tensor has equal values at i and j.

    Example:
        unique_ids(tensor([4, 4, 9]), tensor([0, 1, 0])) is [0, 1, 2]
    """
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]
