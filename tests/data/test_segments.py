"""Sums over units, and the numbering of units."""

from __future__ import annotations

import torch
from tensors import numbers, units

from agent_r1.data.segments import (
    first_seen_ids,
    index_within,
    previous_within,
    unique_ids,
    segment_count,
    segment_first,
    segment_last,
    segment_mean,
    segment_sum,
)


def test_sums_and_means_also_of_a_unit_without_elements() -> None:
    x, unit = numbers(1, 2, 3, 10), units(0, 2, 2, 0)
    assert segment_count(unit).tolist() == [2, 0, 2]
    assert segment_sum(x, unit).tolist() == [11, 0, 5]
    assert segment_mean(x, unit).tolist() == [5.5, 0, 2.5]


def test_where_units_begin_and_end() -> None:
    unit = units(0, 0, 0, 1, 2, 2)
    assert segment_first(unit).tolist() == [0, 3, 4]
    assert segment_last(unit).tolist() == [2, 3, 5]
    assert index_within(unit).tolist() == [0, 1, 2, 0, 0, 1]
    assert previous_within(unit).tolist() == [-1, 0, 1, -1, -1, 4]


def test_units_are_numbered_by_what_they_are() -> None:
    assert first_seen_ids(["b", "a", "b", ("a", 1)]).tolist() == [0, 1, 0, 2]
    assert unique_ids(units(4, 4, 9), units(0, 1, 0)).tolist() == [0, 1, 2]
    same = unique_ids(units(4, 9, 4), units(1, 0, 1))
    assert same[0] == same[2] != same[1]
    assert torch.equal(unique_ids(units(7, 7)), units(0, 0))
