"""The printed objective contains every setting that matters, and changes with it."""

from __future__ import annotations

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


def test_the_objective_changes_with_every_setting() -> None:
    tried = {}
    for name, algorithm in ALGORITHMS.items():
        texts = changed(name)
        tried[name] = len(texts)
        same = {key for key, text in texts.items() if text == objective(algorithm)}
        assert same <= WITHOUT_EFFECT.keys(), name
    assert min(tried.values()) >= 6 and sum(tried.values()) > 400  # control: few settings cannot be changed alone


def test_no_two_algorithms_have_the_same_objective() -> None:
    assert len({objective(algorithm) for algorithm in ALGORITHMS.values()}) == len(ALGORITHMS)
    for algorithm in ALGORITHMS.values():
        assert all(clauses(algorithm)) and algorithm.paper + algorithm.deviations
