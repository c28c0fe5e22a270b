"""Segment reductions: sums, means, maxima and indices per unit.

A unit is the turn or trajectory of a token, or the group of a trajectory. The functions take the elements (N,) and the
index of each element's unit, ``unit`` (N,). Indices begin with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(unit: Tensor) -> Tensor:
    """Return the number of elements of each unit (a turn, a trajectory or a group): (units,).

    ``unit`` (N,) holds the index of each element's unit. Example: [0, 0, 1] -> [2, 1].
    """
    return torch.bincount(unit)


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """Return the sum of the elements ``x`` (N,) of each unit: (units,).

    ``unit`` (N,) holds the index of each element's turn, trajectory or group.
    """
    return x.new_zeros(len(segment_count(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """Return the mean of the elements ``x`` (N,) of each unit: (units,). The mean of a unit without elements is 0.

    ``unit`` (N,) holds the index of each element's turn, trajectory or group.
    """
    return segment_sum(x, unit) / segment_count(unit).clamp(min=1)


def segment_max(x: Tensor, unit: Tensor) -> Tensor:
    """Return the maximum of the elements ``x`` (N,) of each unit: (units,).

    The maximum of a unit without elements is 0, and ``x`` must not be negative. ``unit`` (N,) holds the index of each
    element's turn, trajectory or group.
    """
    return x.new_zeros(len(segment_count(unit))).scatter_reduce(0, unit, x, "amax")


def segment_last(unit: Tensor) -> Tensor:
    """Return the index of the last element of each unit: (units,).

    ``unit`` (N,) holds the index of each element's turn, trajectory or group. Units must be contiguous and not empty.
    """
    return segment_count(unit).cumsum(0) - 1  # (units,) counts of the units 0 .. u, minus 1


def segment_first(unit: Tensor) -> Tensor:
    """Return the index of the first element of each unit: (units,).

    ``unit`` (N,) holds the index of each element's turn, trajectory or group. Units must be contiguous and not empty.
    """
    return segment_last(unit) - segment_count(unit) + 1


def index_within(unit: Tensor) -> Tensor:
    """Return the index of each element in its unit, from 0: (N,). Units must be contiguous and not empty.

    Example:
        index_within(tensor([0, 0, 1, 1, 1])) is [0, 1, 0, 1, 2]
    """
    return torch.arange(len(unit)) - segment_first(unit)[unit]


def previous_within(unit: Tensor) -> Tensor:
    """Return the index of the previous element in the same unit: (N,). The first element of a unit has -1.

    Units must be contiguous and not empty.

    Example:
        previous_within(tensor([0, 0, 1, 1, 1])) is [-1, 0, -1, 2, 3]
    """
    positions = torch.arange(len(unit))  # (N,)
    return torch.where(positions == segment_first(unit)[unit], -1, positions - 1)


def unique_ids(*keys: Tensor) -> Tensor:
    """Return an id, from 0, for each of N elements: (N,).

    Two elements have the same id if they have equal values in every one of the tensors ``keys``, (N,) each.

    Example:
        unique_ids(tensor([4, 4, 9]), tensor([0, 1, 0])) is [0, 1, 2]
    """
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]
