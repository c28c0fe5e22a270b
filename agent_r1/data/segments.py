"""The one primitive: sums over units. (N,) elements -> (units,) numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segment_count(unit: Tensor) -> Tensor:
    """How many elements each unit has: (N,) -> (units,)."""
    return torch.bincount(unit)


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """The sum of each unit's elements: (N,) -> (units,)."""
    return x.new_zeros(len(segment_count(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """The mean of each unit's elements: (N,) -> (units,); 0 for a unit that has none."""
    return segment_sum(x, unit) / segment_count(unit).clamp(min=1)


def segment_last(unit: Tensor) -> Tensor:
    """The place of each unit's last element: (N,) -> (units,). Elements are ordered by unit and no unit is empty."""
    return segment_count(unit).cumsum(0) - 1


def segment_first(unit: Tensor) -> Tensor:
    """The place of each unit's first element: (N,) -> (units,). Elements are ordered by unit and no unit is empty."""
    return segment_last(unit) - segment_count(unit) + 1


def renumbered(*keys: Tensor) -> Tensor:
    """Units from 0 for each different combination of the keys' numbers: (N,) each -> (N,).

    Example:
        renumbered(tensor([4, 4, 9]), tensor([0, 1, 0])) is [0, 1, 2]
    """
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]


def places_within(unit: Tensor) -> Tensor:
    """The place of each element among those of its unit, from 0: (N,) -> (N,). Elements are ordered by unit."""
    return torch.arange(len(unit)) - segment_first(unit)[unit]


def previous_within(unit: Tensor) -> Tensor:
    """The place of the element before each in its unit, -1 for the first: a unit's elements as a chain."""
    places = torch.arange(len(unit))
    return torch.where(places == segment_first(unit)[unit], -1, places - 1)


def numbered(names: Sequence[object]) -> Tensor:
    """A number from 0 for each different name, in order of first appearance.

    Example:
        numbered(["b", "a", "b"]) is [0, 1, 0]
    """
    found: dict[object, int] = {}
    return torch.tensor([found.setdefault(name, len(found)) for name in names], dtype=torch.int64)
