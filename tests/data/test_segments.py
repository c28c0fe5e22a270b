"""Segment reductions and ids of units."""

from __future__ import annotations

import torch
from tensors import numbers, units

from agent_r1.data.batch import (
    index_within,
    previous_within,
    segment_count,
    segment_first,
    segment_last,
    segment_max,
    segment_mean,
    segment_sum,
    unique_ids,
)


def test_sums_means_and_maxima_also_of_an_empty_unit() -> None:
    x, unit = numbers(1, 2, 3, 10), units(0, 2, 2, 0)
    assert segment_count(unit).tolist() == [2, 0, 2]
    assert segment_sum(x, unit).tolist() == [11, 0, 5]
    assert segment_mean(x, unit).tolist() == [5.5, 0, 2.5]
    assert segment_max(x, unit).tolist() == [10, 0, 3]


def test_positions_of_units() -> None:
    unit = units(0, 0, 0, 1, 2, 2)
    assert segment_first(unit).tolist() == [0, 3, 4]
    assert segment_last(unit).tolist() == [2, 3, 5]
    assert index_within(unit).tolist() == [0, 1, 2, 0, 0, 1]
    assert previous_within(unit).tolist() == [-1, 0, 1, -1, -1, 4]


def test_ids_of_distinct_values() -> None:
    assert unique_ids(units(4, 4, 9), units(0, 1, 0)).tolist() == [0, 1, 2]
    same = unique_ids(units(4, 9, 4), units(1, 0, 1))
    assert same[0] == same[2] != same[1]
    assert torch.equal(unique_ids(units(7, 7)), units(0, 0))
