"""The printed objective holds every number that counts, and changes with it."""

from __future__ import annotations

import pytest

from agent_r1.algorithms.objective import clauses, objective
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm, parameters
from agent_r1.core.errors import InvalidInput

SILENT = {
    "advantage.epsilon": "nothing is divided by a deviation",
    "kl.horizon": "without kl.target the coefficient stays",
}
"""Numbers that may change without changing what is optimised, and when."""


def other(value: object) -> object:
    """Another value of a number or a switch."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value / 2 if isinstance(value, float) and value else 0.25


def changed(name: str) -> dict[str, str]:
    """The objective with each of the row's numbers changed, for those that can be."""
    found: dict[str, str] = {}
    for key, value in parameters(ALGORITHMS[name]):
        if isinstance(value, bool | int | float):
            try:
                found[key] = objective(build_algorithm(name, {key: other(value)}))
            except InvalidInput:
                continue
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_changes_with_every_number_of_the_row(name: str) -> None:
    same = {key for key, said in changed(name).items() if said == objective(ALGORITHMS[name])}
    assert same <= SILENT.keys()


def test_enough_numbers_were_changed() -> None:
    # control of the test above: what cannot be changed alone is little
    tried = {name: len(changed(name)) for name in ALGORITHMS}
    assert min(tried.values()) >= 6 and sum(tried.values()) > 400


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("grpo", {"loss.clip_high": 0.28}, "min(r A, clip(r, 0.8, 1.28) A), at least 3 A where A < 0"),
        ("grpo", {"kl.coefficient": 0.02}, "0.02 KL in the loss; KL = k3 with the gradient of k2"),
        ("grpo", {"kl.target": 0.1, "kl.horizon": 500}, "steered to 0.1 over 500 trajectories"),
        ("grpo", {"correction.high": 3.0}, "each token times min(w, 3); w = pi_old / mu of the token"),
        ("grpo", {"rejection.low": 0.9}, "each trajectory left out whose mean of pi_old / mu is not in [0.9, 1.01]"),
        ("grpo", {"entropy_coef": 0.01}, "plus 0.01 the entropy"),
        ("grpo", {"epochs": 3}, "3 epochs"),
        ("grpo", {"masks.loss": False}, "loss mask off"),
        (
            "grpo",
            {"shaping.turns": 0.1, "filters.zero_variance": "none"},
            "R less mean R of the group (if above 0) times (0.1 turns",
        ),
        ("dr-grpo", {"length": 77}, "maximise the sum over tokens / (77 * trajectories) of"),
        ("gspo", {}, "r = pi / pi_old, geometric mean over the trajectory"),
        ("dppo", {}, "r = pi / mu"),
        ("ppo", {"advantage.bootstrap": True}, "where an episode was cut, V of the state it stopped in follows"),
        ("vapo", {}, "the critic alone for 2 updates"),
        ("dapo", {}, "up to 3 rounds of further groups"),
        ("remax", {}, "left out: without greedy attempt"),
    ],
)
def test_it_says(name: str, settings: dict[str, object], says: str) -> None:
    said = objective(build_algorithm(name, settings))
    assert says in said and "\n" not in said
    assert says not in objective(ALGORITHMS["rft"])  # control


def test_no_two_algorithms_say_the_same() -> None:
    assert len({objective(row) for row in ALGORITHMS.values()}) == len(ALGORITHMS)
    for row in ALGORITHMS.values():
        assert all(clauses(row)) and row.paper + row.deviations
