"""Segment reductions: sums, means and positions per unit. (N,) elements and their units (N,) -> (units,) numbers.

A unit is whatever an element belongs to: the turn or trajectory of a token, the group of a trajectory. Units are
numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def segment_count(unit: Tensor) -> Tensor:
    """Return the number of elements of each unit: (N,) -> (units,)."""
    return torch.bincount(unit)


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """Return the sum over each unit's elements: (N,) -> (units,)."""
    return x.new_zeros(len(segment_count(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """Return the mean over each unit's elements: (N,) -> (units,); 0 for an empty unit."""
    return segment_sum(x, unit) / segment_count(unit).clamp(min=1)


def segment_max(x: Tensor, unit: Tensor) -> Tensor:
    """Return the maximum over each unit's elements, which are not negative: (N,) -> (units,); 0 for an empty unit."""
    return x.new_zeros(len(segment_count(unit))).scatter_reduce(0, unit, x, "amax")


def segment_last(unit: Tensor) -> Tensor:
    """Return the position of each unit's last element: (N,) -> (units,). Units are contiguous and not empty."""
    return segment_count(unit).cumsum(0) - 1  # units are contiguous, so counts add up to positions


def segment_first(unit: Tensor) -> Tensor:
    """Return the position of each unit's first element: (N,) -> (units,). Units are contiguous and not empty."""
    return segment_last(unit) - segment_count(unit) + 1


def index_within(unit: Tensor) -> Tensor:
    """Return the index of each element within its unit, from 0: (N,) -> (N,). Units are contiguous and not empty."""
    return torch.arange(len(unit)) - segment_first(unit)[unit]


def previous_within(unit: Tensor) -> Tensor:
    """Return the position of the element before each one in its unit, -1 for the first: (N,) -> (N,)."""
    positions = torch.arange(len(unit))  # (N,)
    return torch.where(positions == segment_first(unit)[unit], -1, positions - 1)


def unique_ids(*keys: Tensor) -> Tensor:
    """Return an id from 0 for each distinct combination of the keys' values: (N,) each -> (N,).

    Example:
        unique_ids(tensor([4, 4, 9]), tensor([0, 1, 0])) is [0, 1, 2]
    """
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]


def first_seen_ids(values: Iterable[object]) -> Tensor:
    """Return an id from 0 for each distinct value, in the order of first appearance.

    Example:
        first_seen_ids(["b", "a", "b"]) is [0, 1, 0]
    """
    ids: dict[object, int] = {}
    return torch.tensor([ids.setdefault(value, len(ids)) for value in values], dtype=torch.int64)
