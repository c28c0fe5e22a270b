"""Tokens that the policy did not choose get no gradient, and change no credit of those it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.learn.algebra import generalised_advantages
from agent_r1.learn.batch import Batch, assemble
from agent_r1.learn.passes import Models, Prepared, learn
from agent_r1.learn.row import Signals, TokenView
from agent_r1.learn.rows import ROWS, build_row
from agent_r1.learn.samples import admit
from agent_r1.learn.sequences import tree_sequences
from agent_r1.model.value import value_model


def gradient_by_position(make: Any, batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """The size of the loss' derivative by the logits at each position of the one sequence; which positions predict."""
    policy, row = make.model(), build_row(name, {})
    critic = value_model(policy) if "critic" in row.needs else None
    found: list[Tensor] = []
    # the logits are a linear map of full rank of these states, so that one derivative vanishes with the other
    policy.base_model.norm.register_forward_hook(lambda _, __, states: states.register_hook(found.append) and None)
    values = None if critic is None else torch.linspace(0, 1, len(batch.ids), dtype=torch.float64)
    models = Models(policy, critic, 1.0, 10_000)
    prepared = Prepared(batch, row.credit(batch, Signals(values)), values, None)
    learn(models, row, prepared, batch.sequences, 1.0)
    predicts = torch.zeros(len(batch.sequences[0]), dtype=torch.bool)
    predicts[batch.sequences[0].predictors] = True
    return found[0][0].abs().sum(-1), predicts


@pytest.mark.parametrize("name", ROWS)
def test_positions_that_predict_no_action_token_get_exactly_no_gradient(name: str, make: Any) -> None:
    turns = make.chain(([1, 2, 3], [4, 5]), ([6, 7, 8], [9]), ([10, 11], [12, 13]))
    longest = make.trajectory(turns, {"score": 1.0})
    other = make.trajectory(make.chain(([1], [2])), {"score": 0.0}, member=1)
    batch = assemble(admit(make.groups(longest, other), {}).samples, tree_sequences)
    size, predicts = gradient_by_position(make, batch, name)
    assert size[~predicts].count_nonzero() == 0
    assert (size[predicts] > 0).all()  # control: the others do get some


def test_a_loss_over_observations_too_would_have_been_seen(make: Any) -> None:
    # control of the control: were the observation an action, its positions would get gradient
    merged = make.trajectory([make.turn(0, [1, 2, 3], [4, 5, 6, 7, 8, 9])], {"score": 1.0})
    other = make.trajectory(make.chain(([1], [2])), {"score": 0.0}, member=1)
    batch = assemble(admit(make.groups(merged, other), {}).samples, tree_sequences)
    size, _ = gradient_by_position(make, batch, "grpo")
    assert (size[4:8] > 0).all()


ACTIONS = ([4, 5], [9], [12, 13, 14])
QUIET = ([1], [2], [3])
TALKATIVE = ([1, 7, 7, 7], [2] * 9, [])


def batch_with(make: Any, observations: Sequence[Sequence[int]]) -> Batch:
    """One attempt with these observations between the same actions, one other."""
    acting = make.trajectory(
        make.chain(*zip(observations, ACTIONS, strict=True)), {"score": 1.0, "steps": (0.1, 0.2, 0.3)}
    )
    other = make.trajectory(make.chain(([1], [2, 3])), {"score": 0.0}, member=1)
    return assemble(admit(make.groups(acting, other), {}).samples, tree_sequences)


@pytest.mark.parametrize("name", ROWS)
def test_inserting_or_deleting_tool_tokens_changes_no_credit_and_no_loss(name: str, make: Any) -> None:
    row = build_row(name, {"gamma": 0.9, "lam": 0.8} if name == "ppo" else {})
    logprobs, old, values, old_values = torch.randn(
        4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    results = []
    for observations in (QUIET, TALKATIVE):
        batch = batch_with(make, observations)
        credit = row.credit(batch, Signals(old_values))
        loss, _ = row.loss(TokenView(logprobs, old, values, old_values), credit)
        results.append((credit.advantage, credit.weight, loss))
    for quiet, talkative in zip(*results, strict=True):
        assert torch.equal(quiet, talkative)


def test_credit_over_all_tokens_would_have_changed(make: Any) -> None:
    # control: the same recursion without the advantage mask, over observations as well
    def dense(observations: Sequence[Sequence[int]]) -> Tensor:
        mask = torch.tensor(
            [
                flag
                for seen, said in zip(observations, ACTIONS, strict=True)
                for flag in [0] * len(seen) + [1] * len(said)
            ]
        )
        rewards = torch.zeros(len(mask), dtype=torch.float64)
        rewards[-1] = 1.0
        unit = torch.zeros(len(mask), dtype=torch.int64)
        return generalised_advantages(rewards, 0 * rewards, torch.zeros(1).double(), unit, 0.9, 0.8)[mask == 1]

    assert not torch.allclose(dense(QUIET), dense(TALKATIVE))
