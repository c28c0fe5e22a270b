"""The terms of an algorithm that cannot act under the given settings are named."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from updating import make_updater, update

from agent_r1.algorithms.objective import inactive_terms
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.commands.algorithms import algorithms


def test_the_bounds_that_cannot_act_are_named_for_one_step_on_fresh_samples() -> None:
    grpo = inactive_terms(ALGORITHMS["grpo"], 1, 0)
    assert "r is 1" in grpo and "loss.clip_low, loss.clip_high, loss.dual_clip cannot act" in grpo
    assert "ratio_level" in inactive_terms(ALGORITHMS["gspo"], 1, 0) and "ratio_level" not in grpo
    assert "advantage.value_clip" in inactive_terms(ALGORITHMS["ppo"], 1, 0)
    for steps, max_staleness in ((2, 0), (1, 1)):
        assert inactive_terms(ALGORITHMS["grpo"], steps, max_staleness) == ""
    assert inactive_terms(ALGORITHMS["reinforce"], 1, 0) == "", "its loss has no ratio"
    assert inactive_terms(ALGORITHMS["top-k-distillation"], 1, 0) == "", "its advantage is 0"


@pytest.mark.parametrize(("minibatches", "are_equal"), [(1, True), (2, False)])
def test_losses_whose_bounds_cannot_act_train_alike(minibatches: int, are_equal: bool, make) -> None:  # type: ignore[no-untyped-def]
    weights = []
    for name in ("grpo", "cispo"):
        model = make.model()
        update(make_updater(model, name, learning_rate=1e-2, minibatches=minibatches), make.random_groups(0))
        weights.append(model.lm_head.weight.detach().clone())
    assert weights[0].allclose(weights[1], atol=1e-6) == are_equal
    assert bool(inactive_terms(ALGORITHMS["grpo"], minibatches, 0)) == are_equal


@pytest.mark.parametrize(
    ("options", "is_named"), [([], True), (["--trainer.minibatches", "2"], False), (["--algorithm.epochs", "2"], False)]
)
def test_the_command_names_inactive_terms_for_the_given_settings(options: list[str], is_named: bool) -> None:
    text = CliRunner().invoke(algorithms, ["grpo", *options]).output
    found = json.loads(CliRunner().invoke(algorithms, ["grpo", "--json", *options]).output)["algorithms"]["grpo"]
    assert ("inactive" in text) == bool(found["inactive"]) == is_named
