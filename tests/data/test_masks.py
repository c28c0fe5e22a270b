"""The advantage mask and the loss mask: observations get no gradient and change no weight of the actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.advantages.returns import Zero
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import generalized_advantages
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenOutputs, TokenWeights, TopTokens
from agent_r1.data.batch import TokenScope, TrainingBatch, assemble_batch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer.forward_backward import ModelSet, forward_backward
from agent_r1.trainer.protocol import PreparedBatch

ACTIONS_ONLY = [name for name, algorithm in ALGORITHMS.items() if algorithm.token_scope == "actions"]
KL_COEF = 0.1


def outputs_for(batch: TrainingBatch) -> ModelOutputs:
    """Return random model outputs for the action tokens and turns of a batch; NaN for observations."""
    random = torch.Generator().manual_seed(0)
    columns = torch.full((3, len(batch.ids)), torch.nan, dtype=torch.float64)
    columns[:, batch.action_mask] = torch.randn(3, int(batch.action_mask.sum()), generator=random, dtype=torch.float64)
    after_action = torch.randn(len(batch.turn_trajectory), generator=random, dtype=torch.float64)
    values = StateValues(columns[0], after_action)
    top = TopTokens(batch.ids[:, None] // 2, columns[2, :, None].abs().neg())
    return ModelOutputs(batch.sampler_logprobs, values, columns[1], columns[2], columns[2].abs(), top)


def gradient_by_position(make: Any, batch: TrainingBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return the size of the loss gradient at each position of the first sequence, and which positions predict an
    action token."""
    policy = make.model()
    models = ModelSet(policy, 1.0, 10_000, build_value_model(policy) if "critic" in algorithm.needs else None)
    found: list[Tensor] = []
    # the logits are a linear map of full rank of these states, so both gradients are 0 at the same positions
    policy.base_model.norm.register_forward_hook(lambda _, __, states: states.register_hook(found.append) and None)
    outputs = outputs_for(batch)
    weights = algorithm.compute_token_weights(batch, outputs, KL_COEF)
    forward_backward(models, algorithm, PreparedBatch(batch, weights, outputs, None))
    sequence = batch.sequences[0]
    predicts = torch.zeros(len(sequence), dtype=torch.bool)
    predicts[sequence.logit_positions[batch.action_mask[sequence.tokens]]] = True
    return found[0][0].abs().sum(-1), predicts


def two_attempts(make: Any, scope: TokenScope) -> TrainingBatch:
    turns = make.chain(([1, 2, 3], [4, 5]), ([6, 7, 8], [9]), ([10, 11], [12, 13]))
    longest, other = make.trajectory(turns, {"score": 1.0}), make.trajectory(turns, {"score": 0.0}, member=1)
    groups = make.groups(longest, other, greedy={0: make.trajectory(turns, {"score": 0.4}, member=2)})
    return assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree, scope)


@pytest.mark.parametrize("name", ACTIONS_ONLY)
def test_positions_that_predict_no_action_token_get_exactly_no_gradient(name: str, make: Any) -> None:
    size, predicts = gradient_by_position(make, two_attempts(make, "actions"), ALGORITHMS[name])
    assert size[~predicts].count_nonzero() == 0
    reached = size[predicts] > 0
    assert reached.any() and (reached.all() or ALGORITHMS[name].token_mask is not None)  # control: a gradient elsewhere


@pytest.mark.parametrize(
    "algorithm", [ALGORITHMS["echo"], build_algorithm("grpo", {"masks.loss": False, "masks.advantage": True})]
)
def test_a_loss_on_observations_is_detected(algorithm: Algorithm, make: Any) -> None:
    # control of the control: these train on observations
    size, predicts = gradient_by_position(make, two_attempts(make, "all"), algorithm)
    assert size[~predicts][2:7].count_nonzero() == 5 and size[~predicts][:2].count_nonzero() == 0


ACTIONS = ([4, 5], [9], [12, 13, 14])
SHORT = ([1], [2], [3])
LONG = ([1, 7, 7, 7], [2] * 9, [])


def batch_with(make: Any, observations: Sequence[Sequence[int]], scope: TokenScope) -> TrainingBatch:
    """Return a batch of an attempt with these observations between the same actions, and of another attempt."""
    attempt = make.trajectory(
        make.chain(*zip(observations, ACTIONS, strict=True)), {"score": 1.0, "steps": (0.1, 0.2, 0.3)}
    )
    other = make.trajectory(make.chain(([1], [2, 3])), {"score": 0.0}, member=1)
    groups = make.groups(attempt, other, greedy={0: make.trajectory(other.turns, {"score": 0.4}, member=2)})
    return assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree, scope)


def discounting(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with discounts below 1, if it has any."""
    keys = {"gamma": 0.9, **({"lam": 0.8} if isinstance(algorithm.advantage, WithCritic) else {})}
    return build_algorithm(
        algorithm.name, {f"advantage.{key}": value for key, value in keys.items() if key in dict(algorithm.advantage)}
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_inserting_or_deleting_observations_changes_no_weight_and_no_loss(name: str, make: Any) -> None:
    algorithm = discounting(ALGORITHMS[name])
    logprobs, old, values, reference = torch.randn(
        4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    results = []
    for observations in (SHORT, LONG):
        batch = batch_with(make, observations, algorithm.token_scope)
        weights = algorithm.compute_token_weights(batch, outputs_for(batch), KL_COEF)
        found = [weights.advantage[batch.action_mask], weights.loss_weight[batch.action_mask]]
        if algorithm.token_scope == "actions":
            unit = algorithm.ratio_unit(batch)
            new, before = StateValues(values, values[:4]), StateValues(values + 0.3, values[:4])
            sampler, trajectory = batch.sampler_logprobs, batch.token_trajectory
            top = logprobs.abs().neg()[:, None], reference.abs().neg()[:, None]
            tokens = TokenOutputs(logprobs, -logprobs, old, unit, reference, new, before, sampler, trajectory, *top)
            found.append(algorithm.compute_loss(tokens, weights)[0])
        results.append(found)
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long) and (bool(short.any()) or isinstance(algorithm.advantage, Zero))


def test_advantages_over_all_tokens_would_have_changed(make: Any) -> None:
    # control: the same recursion without the advantage mask, over observations too
    def dense(observations: Sequence[Sequence[int]]) -> Tensor:
        mask = torch.tensor(
            [
                flag
                for observation, action in zip(observations, ACTIONS, strict=True)
                for flag in [0] * len(observation) + [1] * len(action)
            ]
        )
        rewards = torch.zeros(len(mask), dtype=torch.float64)
        rewards[-1] = 1.0
        unit = torch.zeros(len(mask), dtype=torch.int64)
        zeros = torch.zeros_like(rewards)
        return generalized_advantages(rewards, zeros, zeros[:1], unit, 0.9, 0.8)[mask == 1]

    assert not torch.allclose(dense(SHORT), dense(LONG))


def weights_without(
    make: Any, name: str, masks: dict[str, bool], observations: Sequence[Sequence[int]]
) -> TokenWeights:
    algorithm = build_algorithm(name, {"advantage.gamma": 0.9, **{f"masks.{mask}": on for mask, on in masks.items()}})
    batch = batch_with(make, observations, algorithm.token_scope)
    zeros = torch.zeros(len(batch.ids), dtype=torch.float64)
    outputs = outputs_for(batch)
    assert outputs.values is not None
    values = StateValues(zeros, outputs.values.after_action)
    return algorithm.compute_token_weights(batch, replace(outputs, values=values), KL_COEF)


def test_without_the_advantage_mask_observations_are_time_steps(make: Any) -> None:
    # tokens a a | o | a | o o | a a a: the outcome 1 + 0.3 is on the last one, 0.1 and 0.2 on the ends of turns
    algorithm = build_algorithm("reinforce++", {"advantage.gamma": 0.5, "masks.advantage": False, "kl": "none"})
    batch = batch_with(make, ([1], [2], [3, 4]), algorithm.token_scope)
    assert batch.ids.tolist() == [4, 5, 2, 9, 3, 4, 12, 13, 14, 2, 3]
    last = [1.3 / 4, 1.3 / 2, 1.3]
    second, third = 0.2 + last[0] / 8, last[0] / 4
    first = 0.1 + second / 4
    to_go = numbers(first / 2, first, second / 2, second, third, 2 * third, *last, 0, 0)
    weights = algorithm.compute_token_weights(batch, outputs_for(batch), KL_COEF)
    assert close(weights.advantage, (to_go - to_go.mean()) / to_go.std(), 1e-6)
    assert close(weights.loss_weight, batch.action_mask / 8)  # the loss mask still holds


@pytest.mark.parametrize("name", ["ppo", "reinforce++"])
def test_observations_change_advantages_without_the_advantage_mask_only(name: str, make: Any) -> None:
    def acting(masks: dict[str, bool], observations: Sequence[Sequence[int]]) -> Tensor:
        weights = weights_without(make, name, masks, observations)
        return weights.advantage[weights.loss_weight > 0]

    assert torch.equal(acting({}, SHORT), acting({}, LONG))
    assert not close(acting({"advantage": False}, SHORT), acting({"advantage": False}, LONG), 1e-3)


def test_without_the_loss_mask_observations_have_loss_weights(make: Any) -> None:
    algorithm = build_algorithm("grpo", {"masks.loss": False})
    batch = batch_with(make, SHORT, algorithm.token_scope)
    weights = algorithm.compute_token_weights(batch, ModelOutputs())
    assert batch.action_mask.sum() == 8 and len(batch.ids) == 10
    assert weights.loss_weight.tolist() == pytest.approx([0.1] * 10)
    high = 1.6 / 2 / (1.6 / 2**0.5)
    assert weights.advantage.tolist() == pytest.approx([high] * 8 + [-high] * 2, rel=1e-5)
    assert build_algorithm("grpo", {}).compute_token_weights(
        batch, ModelOutputs()
    ).loss_weight.tolist() == pytest.approx(
        (batch.action_mask / 8).tolist()
    )  # control: with the mask they have weight 0
