"""Loss weights sum to 1, except for the aggregation over a constant."""

from __future__ import annotations

from tensors import close, numbers, units

from agent_r1.algorithms.ops import aggregation_weights


def test_weights_of_tokens_of_units_and_over_a_constant() -> None:
    unit = units(0, 0, 0, 2)  # unit 1 has no tokens and does not count
    assert aggregation_weights(unit, "token_mean").tolist() == [0.25] * 4
    for aggregation in ("turn_mean", "trajectory_mean", "group_mean"):
        assert close(aggregation_weights(unit, aggregation), numbers(1 / 6, 1 / 6, 1 / 6, 1 / 2))
    assert aggregation_weights(unit, "constant", 10.0).tolist() == [1 / 20] * 4
