"""Each role of a game has a running mean of its returns as the baseline, which is part of the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.trajectory import Group
from agent_r1.trainer.updater import PolicyUpdater, Trained

RETURNS = {"first": (1.0, 1.0, 0.0), "second": (0.0, 0.0, 1.0)}


def matches(make: Any) -> list[Group]:
    """Return a group of three attempts, of two tokens each, for each of two players."""
    turns = make.chain(([1], [2, 3]))
    groups = make.groups(
        *(
            make.trajectory(turns, {"return": earned}, group=group, member=member)
            for group, returns in enumerate(RETURNS.values())
            for member, earned in enumerate(returns)
        )
    )
    return [replace(group, role=role) for group, role in zip(groups, RETURNS, strict=True)]


def advantages(updater: PolicyUpdater, make: Any) -> list[float]:
    outcomes = sorted(update(updater, matches(make)).outcomes, key=lambda one: one.attempt.sort_key)
    return [one.advantage_sum / 2 if isinstance(one, Trained) else 0.0 for one in outcomes]


def expected(decay: float, updates: int) -> list[float]:
    """Return the advantages of the last update: each return less its role's running mean before it."""
    baseline = dict.fromkeys(RETURNS, 0.0)
    for _ in range(updates):
        found = []
        for role, returns in RETURNS.items():
            for earned in returns:
                found.append(earned - baseline[role])
                baseline[role] = decay * baseline[role] + (1 - decay) * earned
    return found


def test_each_return_is_compared_with_the_past_of_its_role(make: Any) -> None:
    updater = make_updater(make.model(), build_algorithm("rae", {"advantage.decay": 0.5}))
    for updates in (1, 2):
        assert advantages(updater, make) == pytest.approx(expected(0.5, updates))


def test_a_resumed_run_continues_with_the_same_baselines(make: Any) -> None:
    model = make.model()
    updater = make_updater(model, "rae")
    advantages(updater, make)
    state = updater.state()
    assert {name for name in state.scalars if name.startswith("role_baseline/")} == {
        "role_baseline/first",
        "role_baseline/second",
    }
    resumed = make_updater(model, "rae")
    resumed.load_state(state)
    assert advantages(resumed, make) == pytest.approx(expected(0.95, 2))
