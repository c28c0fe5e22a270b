"""A critic predicts the returns of attempts that it has not seen yet, if it gets enough optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from updating import make_updater, update

from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE
from agent_r1.trainer.config import TrainerConfig

UPDATES = 9
ATTEMPTS = 64
CRITIC = {key.removeprefix("trainer."): value for key, value in TINY_BASE_RECIPE.items() if "critic" in key}
SHARED = {"critic_learning_rate": CRITIC["critic_learning_rate"]}
"""The critic is trained in the passes of the policy: one optimizer step per update."""


def fresh_groups(make: Any, random: torch.Generator) -> list[Group]:
    """Return new attempts of two turns at one task: it is solved if the first action repeats the question's token."""

    def attempt(member: int) -> Trajectory:
        question, other = torch.randint(0, 15, (2,), generator=random).tolist()
        repeats = bool(torch.rand((), generator=random) < 0.5)
        action = question if repeats else other
        turns = make.chain(([question], [action, 15]), ([15], [1, 2]))
        return make.trajectory(turns, {"score": float(action == question)}, member=member)

    return make.groups(*(attempt(member) for member in range(ATTEMPTS)))


def explained_variances(make: Any, settings: Mapping[str, Any], updates: int = UPDATES) -> Sequence[float]:
    """Return the explained variance of each update, which is measured before the update changes the critic."""
    random = torch.Generator().manual_seed(0)
    updater = make_updater(make.model(), "ppo", learning_rate=1e-6, **settings)
    return [update(updater, fresh_groups(make, random)).metrics["critic/explained_variance"] for _ in range(updates)]


def mean_of_the_last_third(values: Sequence[float]) -> float:
    last = values[-(len(values) // 3) :]
    return sum(last) / len(last)


def test_the_critic_of_the_recipe_predicts_new_attempts(make: Any) -> None:
    explained = explained_variances(make, CRITIC)
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # the head begins at zero
    assert mean_of_the_last_third(explained) > 0.3


def test_epochs_of_the_critic_leave_the_first_update_of_the_policy_as_it_is(make: Any) -> None:
    weights = []
    for settings in (SHARED, {**SHARED, "critic_epochs": 2, "critic_minibatches": 3}):
        model = make.model()
        updater = make_updater(model, "ppo", learning_rate=1e-2, **settings)
        weights.append([update(updater, make.random_groups(0)).version.number, model.state_dict()])
    (first, alone), (second, beside) = weights
    assert first == second == 1
    assert all(torch.equal(tensor, beside[name]) for name, tensor in alone.items())


def test_minibatches_of_the_critic_need_epochs_of_their_own() -> None:
    with pytest.raises(ValueError, match="give critic_epochs too"):
        TrainerConfig(critic_minibatches=2)


def test_a_critic_learns_the_outcome_from_the_probabilities_of_tokens(make: Any) -> None:
    # The tokens of the attempts are noise; one that was improbable spoils the outcome.

    def groups(random: torch.Generator) -> list[Group]:
        def attempt(member: int) -> Trajectory:
            ids = torch.randint(0, 15, (4,), generator=random).tolist()
            spoiled = bool(torch.rand((), generator=random) < 0.5)
            logprobs = (-0.1, -4.0 if spoiled else -0.1)
            turns = (make.turn(0, ids[:2], ids[2:], logprobs=logprobs), make.turn(1, [15], [1, 2], parent=0))
            return make.trajectory(turns, {"score": float(not spoiled)}, member=member)

        return make.groups(*(attempt(member) for member in range(ATTEMPTS)))

    def explained(reads_logprobs: bool) -> float:
        settings = {"critic_learning_rate": 3e-3, "critic_epochs": 4, "critic_minibatches": 4}
        updater = make_updater(make.model(), "ppo", **settings, critic_reads_logprobs=reads_logprobs)
        random = torch.Generator().manual_seed(0)
        return [update(updater, groups(random)).metrics["critic/explained_variance"] for _ in range(6)][-1]

    assert explained(reads_logprobs=True) > 0.3 > 0.15 > explained(reads_logprobs=False)
