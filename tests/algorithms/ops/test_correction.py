"""Factors where sampler and trainer disagree, by hand."""

from __future__ import annotations

import math

from tensors import close, numbers, units

from agent_r1.algorithms.ops.importance_sampling import mean_log_ratio, product_log_ratio, truncated, windowed, within

RATIOS = numbers(0.25, 0.5, 1.0, 2.0, 4.0).log()


def test_truncation_window_and_rejection_by_hand() -> None:
    assert close(truncated(RATIOS, 2.0), numbers(0.25, 0.5, 1, 2, 2))
    assert close(windowed(RATIOS, 0.45, 2.5), numbers(0, 0.5, 1, 2, 0))
    assert within(RATIOS, 0.45, 2.5).tolist() == [False, True, True, True, False]


def test_a_unit_has_one_ratio() -> None:
    unit = units(0, 0, 1, 1, 1)
    assert close(product_log_ratio(RATIOS, unit).exp(), numbers(0.125, 0.125, 8, 8, 8))
    assert close(mean_log_ratio(RATIOS, unit).exp(), numbers(*[math.sqrt(0.125)] * 2, 2, 2, 2))


def test_where_they_agree_nothing_changes_and_where_they_ran_apart_all_stays_finite() -> None:
    agreed = numbers(0, 0)
    assert truncated(agreed, 2.0).tolist() == windowed(agreed, 0.5, 5.0).tolist() == [1, 1]
    assert windowed(numbers(1e6), 0.0, math.inf).isfinite().all()
