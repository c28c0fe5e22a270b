"""The printed objective contains every setting that matters, and changes with it."""

from __future__ import annotations

import pytest

from agent_r1.algorithms.algorithm import clauses, objective
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm, parameters
from agent_r1.core.errors import InvalidInput

WITHOUT_EFFECT = {
    "advantage.epsilon": "nothing is divided by a standard deviation",
    "kl.horizon": "without kl.target the coefficient is constant",
}
"""Settings that may change without changing the objective, and when."""


def other(value: object) -> object:
    """Return another value of a number or a switch."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 if isinstance(value, float) and value else 0.25


def changed(name: str) -> dict[str, str]:
    """Return the objective with each numeric setting changed, if it can be changed alone."""
    found: dict[str, str] = {}
    for key, value in parameters(ALGORITHMS[name]).items():
        if isinstance(value, bool | int | float):
            try:
                found[key] = objective(build_algorithm(name, {key: other(value)}))
            except InvalidInput:
                continue
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_objective_changes_with_every_setting(name: str) -> None:
    same = {key for key, text in changed(name).items() if text == objective(ALGORITHMS[name])}
    assert same <= WITHOUT_EFFECT.keys()


def test_enough_settings_were_changed() -> None:
    # control of the test above: few settings cannot be changed alone
    tried = {name: len(changed(name)) for name in ALGORITHMS}
    assert min(tried.values()) >= 6 and sum(tried.values()) > 400


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("grpo", {"loss.clip_high": 0.28}, "min(r A, clip(r, 0.8, 1.28) A), at least 3 A if A < 0"),
        ("grpo", {"kl.coefficient": 0.02}, "0.02 KL in the loss; KL = k3 with the gradient of k2"),
        ("grpo", {"kl.target": 0.1, "kl.horizon": 500}, "adapted to 0.1 over 500 trajectories"),
        ("grpo", {"correction.high": 3.0}, "each token times min(w, 3); w = pi_old / mu of the token"),
        ("grpo", {"rejection.low": 0.9}, "each trajectory left out whose mean of pi_old / mu is not in [0.9, 1.01]"),
        ("grpo", {"entropy_coef": 0.01}, "plus 0.01 the entropy"),
        ("grpo", {"epochs": 3}, "3 epochs"),
        ("grpo", {"masks.loss": False}, "loss mask off"),
        (
            "grpo",
            {"shaping.turns": 0.1},
            "R less mean R of the group (if above 0) times (0.1 turns",
        ),
        ("dr-grpo", {"length": 77}, "maximize the sum over tokens / (77 * trajectories) of"),
        ("gspo", {}, "r = pi / pi_old, geometric mean over the trajectory"),
        ("dppo", {}, "r = pi / mu"),
        ("ppo", {"advantage.bootstrap": True}, "if an episode was truncated, V of its last state follows"),
        ("vapo", {}, "only the critic for 2 updates"),
        ("grpo", {"constant_groups": "drop"}, "groups whose returns are all equal are dropped before the denominators"),
        ("dapo", {}, "up to 3 rounds of further groups"),
        ("remax", {}, "left out: without greedy attempt"),
    ],
)
def test_the_objective_contains(name: str, settings: dict[str, object], expected: str) -> None:
    found = objective(build_algorithm(name, settings))
    assert expected in found and "\n" not in found
    assert expected not in objective(ALGORITHMS["rft"])  # control


def test_no_two_algorithms_have_the_same_objective() -> None:
    assert len({objective(algorithm) for algorithm in ALGORITHMS.values()}) == len(ALGORITHMS)
    for algorithm in ALGORITHMS.values():
        assert all(clauses(algorithm)) and algorithm.paper + algorithm.deviations
