"""Shares of tokens in a loss add up to 1, but for the one over a constant."""

from __future__ import annotations

from tensors import close, numbers, units

from agent_r1.algorithms.ops.loss_weights import token_mean, unit_mean, unit_sum


def test_of_tokens_of_units_and_over_a_constant() -> None:
    unit = units(0, 0, 0, 2)
    assert token_mean(unit).tolist() == [0.25] * 4
    assert close(unit_mean(unit), numbers(1 / 6, 1 / 6, 1 / 6, 1 / 2))  # unit 1 has no tokens and does not count
    assert unit_sum(unit, 10.0).tolist() == [1 / 20] * 4
