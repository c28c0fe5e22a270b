"""Tokens that the policy did not choose get no gradient, and change no credit of those it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops.returns import generalized_advantages
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import TokenWeights, CriticView, ModelOutputs, TokenOutputs
from agent_r1.data.assemble import TokenScope, assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import previous_within
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer.forward_backward import ModelSet, PreparedBatch, forward_backward

ACTIONS_ONLY = [name for name, row in ALGORITHMS.items() if row.token_scope == "actions"]


def said_of(batch: TrainingBatch) -> ModelOutputs:
    """What models might have said of the batch's action tokens and turns; nothing is known of other tokens."""
    random = torch.Generator().manual_seed(0)
    columns = torch.full((3, len(batch.ids)), torch.nan, dtype=torch.float64)
    columns[:, batch.action_mask] = torch.randn(3, int(batch.action_mask.sum()), generator=random, dtype=torch.float64)
    ends = torch.randn(len(batch.turn_trajectory), generator=random, dtype=torch.float64)
    return ModelOutputs(values=columns[0], ends=ends, reference=columns[1], teacher=columns[2], kl_coefficient=0.1)


def gradient_by_position(make: Any, batch: TrainingBatch, row: Algorithm) -> tuple[Tensor, Tensor]:
    """The size of the loss' derivative by the logits at each position of the one sequence; which positions predict."""
    policy = make.model()
    models = ModelSet(policy, 1.0, 10_000, build_value_model(policy) if "critic" in row.needs else None)
    found: list[Tensor] = []
    # the logits are a linear map of full rank of these states, so that one derivative vanishes with the other
    policy.base_model.norm.register_forward_hook(lambda _, __, states: states.register_hook(found.append) and None)
    signals = said_of(batch)
    forward_backward(models, row, PreparedBatch(batch, row.compute_token_weights(batch, signals), signals, None), batch.sequences, 1.0)
    acts = torch.zeros(len(batch.sequences[0]), dtype=torch.bool)
    acts[batch.sequences[0].logit_positions[batch.action_mask[batch.sequences[0].tokens]]] = True
    return found[0][0].abs().sum(-1), acts


def two_attempts(make: Any, scope: TokenScope) -> TrainingBatch:
    turns = make.chain(([1, 2, 3], [4, 5]), ([6, 7, 8], [9]), ([10, 11], [12, 13]))
    longest, other = make.trajectory(turns, {"score": 1.0}), make.trajectory(turns, {"score": 0.0}, member=1)
    groups = make.groups(longest, other, greedy={0: make.trajectory(turns, {"score": 0.4}, member=2)})
    return assemble(select_trainable(groups, {}).samples, pack_prefix_tree, scope)


@pytest.mark.parametrize("name", ACTIONS_ONLY)
def test_positions_that_predict_no_action_token_get_exactly_no_gradient(name: str, make: Any) -> None:
    size, acts = gradient_by_position(make, two_attempts(make, "actions"), ALGORITHMS[name])
    assert size[~acts].count_nonzero() == 0
    assert (size[acts] > 0).all()  # control: the others do get some


@pytest.mark.parametrize("row", [ALGORITHMS["echo"], build_algorithm("grpo", {"masks.loss": False, "masks.advantage": True})])
def test_a_loss_over_observations_too_is_seen(row: Algorithm, make: Any) -> None:
    # control of the control: these forward_backward what the world said
    size, acts = gradient_by_position(make, two_attempts(make, "all"), row)
    assert size[~acts][2:7].count_nonzero() == 5 and size[~acts][:2].count_nonzero() == 0


ACTIONS = ([4, 5], [9], [12, 13, 14])
QUIET = ([1], [2], [3])
TALKATIVE = ([1, 7, 7, 7], [2] * 9, [])


def batch_with(make: Any, observations: Sequence[Sequence[int]], scope: TokenScope) -> TrainingBatch:
    """One attempt with these observations between the same actions, one other."""
    acting = make.trajectory(
        make.chain(*zip(observations, ACTIONS, strict=True)), {"score": 1.0, "steps": (0.1, 0.2, 0.3)}
    )
    other = make.trajectory(make.chain(([1], [2, 3])), {"score": 0.0}, member=1)
    groups = make.groups(acting, other, greedy={0: make.trajectory(other.turns, {"score": 0.4}, member=2)})
    return assemble(select_trainable(groups, {}).samples, pack_prefix_tree, scope)


def discounting(row: Algorithm) -> Algorithm:
    """The row, with time counting wherever it can."""
    keys = {"gamma": 0.9, **({"lam": 0.8} if isinstance(row.advantage, WithCritic) else {})}
    return build_algorithm(row.name, {f"advantage.{key}": value for key, value in keys.items() if key in dict(row.advantage)})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_inserting_or_deleting_tool_tokens_changes_no_credit_and_no_loss(name: str, make: Any) -> None:
    row = discounting(ALGORITHMS[name])
    logprobs, old, values, reference = torch.randn(
        4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    results = []
    for observations in (QUIET, TALKATIVE):
        batch = batch_with(make, observations, row.token_scope)
        credit = row.compute_token_weights(batch, said_of(batch))
        found = [credit.advantage[batch.action_mask], credit.loss_weight[batch.action_mask]]
        if row.token_scope == "actions":
            critic = CriticView(values, values[:4], values + 0.3, values[:4])
            turn, trajectory = batch.token_turn, batch.token_trajectory
            view = TokenOutputs(logprobs, -logprobs, old, turn, trajectory, reference, critic)
            found.append(row.compute_loss(view, credit)[0])
        results.append(found)
    for quiet, talkative in zip(*results, strict=True):
        assert torch.equal(quiet, talkative) and bool(quiet.any())


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
        nothing = torch.zeros_like(rewards)
        return generalized_advantages(rewards, nothing, nothing, previous_within(unit), 0.9, 0.8)[mask == 1]

    assert not torch.allclose(dense(QUIET), dense(TALKATIVE))


def credit_without(make: Any, name: str, masks: dict[str, bool], observations: Sequence[Sequence[int]]) -> TokenWeights:
    row = build_algorithm(name, {"advantage.gamma": 0.9, **{f"masks.{mask}": on for mask, on in masks.items()}})
    batch = batch_with(make, observations, row.token_scope)
    return row.compute_token_weights(batch, replace(said_of(batch), values=torch.zeros(len(batch.ids), dtype=torch.float64)))


def test_without_the_advantage_mask_observations_count_as_time(make: Any) -> None:
    # tokens a a | o | a | o o | a a a: the outcome 1 + 0.3 stands on the last, 0.2 and 0.1 on the ends of turns
    row = build_algorithm("reinforce++", {"advantage.gamma": 0.5, "masks.advantage": False, "kl": "none"})
    batch = batch_with(make, ([1], [2], [3, 4]), row.token_scope)
    assert batch.ids.tolist() == [4, 5, 2, 9, 3, 4, 12, 13, 14, 2, 3]
    last = [1.3 / 4, 1.3 / 2, 1.3]
    second, third = 0.2 + last[0] / 8, last[0] / 4
    first = 0.1 + second / 4
    to_go = numbers(first / 2, first, second / 2, second, third, 2 * third, *last, 0, 0)
    credit = row.compute_token_weights(batch, said_of(batch))
    assert close(credit.advantage, (to_go - to_go.mean()) / to_go.std(), 1e-6)
    assert close(credit.loss_weight, batch.action_mask / 8)  # the loss mask still holds


@pytest.mark.parametrize("name", ["ppo", "reinforce++"])
def test_without_it_what_tools_said_changes_credit_and_with_it_does_not(name: str, make: Any) -> None:
    def acting(masks: dict[str, bool], observations: Sequence[Sequence[int]]) -> Tensor:
        credit = credit_without(make, name, masks, observations)
        return credit.advantage[credit.loss_weight > 0]

    assert torch.equal(acting({}, QUIET), acting({}, TALKATIVE))
    assert not close(acting({"advantage": False}, QUIET), acting({"advantage": False}, TALKATIVE), 1e-3)


def test_without_the_loss_mask_observations_share_in_the_loss(make: Any) -> None:
    row = build_algorithm("grpo", {"masks.loss": False})
    batch = batch_with(make, QUIET, row.token_scope)
    credit = row.compute_token_weights(batch, ModelOutputs())
    assert batch.action_mask.sum() == 8 and len(batch.ids) == 10
    assert credit.loss_weight.tolist() == pytest.approx([0.1] * 10)
    high = 1.6 / 2 / (1.6 / 2**0.5)
    assert credit.advantage.tolist() == pytest.approx([high] * 8 + [-high] * 2, rel=1e-5)
    assert build_algorithm("grpo", {}).compute_token_weights(batch, ModelOutputs()).loss_weight.tolist() == pytest.approx(
        (batch.action_mask / 8).tolist()
    )  # control: with the mask they have none
