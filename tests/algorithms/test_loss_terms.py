"""Reward shaping, KL penalty, correction and rejection, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm, RewardShaping, SoftOverlong
from agent_r1.algorithms.loss_terms import Kl, with_kl_penalty
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, TokenOutputs
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TrainingBatch, TrainingSample, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


def samples_of(make: Any) -> tuple[TrainingSample, ...]:
    """One task: 3 tokens in 2 turns (2 and 1) with 0.5 for the first turn and an outcome of 1.5; 1 token with 1."""
    first = make.trajectory(make.chain(([1], [2, 3]), ([4], [5])), {"step": (0.5, 0.0), "score": 1.5})
    second = make.trajectory(make.chain(([1], [6])), {"score": 1.0}, member=1)
    return select_trainable(make.groups(first, second), {}).samples


@pytest.fixture
def batch(make: Any) -> TrainingBatch:
    return assemble_batch(samples_of(make), pack_prefix_tree)


def with_outcomes(batch: TrainingBatch, *outcomes: float) -> TrainingBatch:
    """Return the batch with other outcome rewards and no others."""
    rewards = torch.zeros(len(batch.ids), dtype=torch.float64).index_put((batch.last_tokens,), numbers(*outcomes))
    return replace(batch, outcome_rewards=numbers(*outcomes), token_rewards=rewards)


def test_a_trajectory_is_penalized_for_its_length_and_its_turns(batch: TrainingBatch) -> None:
    # mean R (2 + 1) / 2 = 1.5; lengths 3 and 1 of 3, turns 2 and 1 of 2
    shaped = RewardShaping(length=0.2, turns=0.1).apply(batch)
    penalties = 1.5 * (0.2 + 0.1), 1.5 * (0.2 / 3 + 0.1 / 2)
    assert close(shaped.returns, numbers(2 - penalties[0], 1 - penalties[1]))
    assert close(shaped.token_rewards, numbers(0, 0.5, 1.5 - penalties[0], 1 - penalties[1]))
    assert close(shaped.outcome_rewards, numbers(1.5 - penalties[0], 1 - penalties[1]))
    assert close(shaped.process_rewards, batch.process_rewards)


def test_a_group_without_success_is_not_penalized(batch: TrainingBatch) -> None:
    for outcomes in ((0.0, 0.0), (-1.0, 0.0), (-1.0, 1.0)):
        failed = with_outcomes(batch, *outcomes)
        assert close(RewardShaping(length=0.2, turns=0.1).apply(failed).returns, failed.returns)
    succeeded = with_outcomes(batch, -1.0, 2.0)  # control
    assert not close(RewardShaping(length=0.2).apply(succeeded).returns, succeeded.returns)


def test_process_rewards_are_divided_by_their_largest_sum_from_a_token_on(make: Any) -> None:
    turns = make.chain(([1], [2]), ([3], [4]), ([5], [6]))
    trajectory = make.trajectory(turns, {"step": (2.0, -1.0, 1.0), "score": 5.0})
    batch = assemble_batch(select_trainable(make.groups(trajectory), {}).samples, pack_prefix_tree)
    shaped = RewardShaping(process_scale="largest").apply(batch)  # sums from each on: 2, 0, 1
    assert close(shaped.token_rewards, numbers(1, -0.5, 5.5), 1e-5)
    assert close(shaped.outcome_rewards, batch.outcome_rewards)
    without = with_outcomes(batch, 5.0)
    assert close(RewardShaping(process_scale="largest").apply(without).token_rewards, without.token_rewards)


def test_shaping_reaches_the_advantage(batch: TrainingBatch) -> None:
    plain, shaped = (
        build_algorithm("dr-grpo", {"shaping.length": share}).compute_token_weights(batch, ModelOutputs()).advantage
        for share in (0.0, 0.2)
    )
    assert close(plain, numbers(0.5, 0.5, 0.5, -0.5))
    half = (2 - 1.5 * 0.2 - (1 - 1.5 * 0.2 / 3)) / 2
    assert close(shaped, numbers(half, half, half, -half))


def test_a_kl_in_the_reward_is_subtracted_from_each_action_token(batch: TrainingBatch) -> None:
    reference = batch.sampler_logprobs - numbers(1, 0, -2, 0.5)
    found = with_kl_penalty(batch, reference, 0.1).token_rewards
    assert close(found, batch.token_rewards - numbers(0.1, 0, -0.2, 0.05))
    observed = replace(batch, action_mask=torch.tensor([True, False, True, True]))
    found = with_kl_penalty(observed, reference + math.nan, 0.1).token_rewards
    assert found.isnan().tolist() == [True, False, True, True]  # observations are not penalized
    with pytest.raises(TypeError, match="reference"):
        with_kl_penalty(batch, None, 0.1)


def test_the_coefficient_adapts_to_the_divergence() -> None:
    kl = Kl(coefficient=0.5, target=0.1, horizon=100.0)
    assert kl.adapt_coefficient(0.5, 0.105, 10) == pytest.approx(0.5 * math.exp(0.05 * 0.1))
    assert kl.adapt_coefficient(0.5, 0.105, 10) == pytest.approx(0.5 * (1 + 0.05 * 0.1), rel=1e-4)  # the factor of verl
    assert kl.adapt_coefficient(0.5, 9.0, 10) == pytest.approx(0.5 * math.exp(0.2 * 0.1))
    assert kl.adapt_coefficient(0.5, -9.0, 10) == pytest.approx(0.5 * math.exp(-0.2 * 0.1))
    assert kl.adapt_coefficient(0.5, 0.0, 10**4) > 0, "however many trajectories an update has"
    assert Kl(coefficient=0.5).adapt_coefficient(0.7, 9.0, 10) == 0.7


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_plus", "k3_unbiased"])
def test_a_kl_in_the_loss_is_weighted_by_loss_weights_and_the_present_coefficient(
    estimator: str, batch: TrainingBatch
) -> None:
    log_ratio = numbers(math.log(2), 0, -math.log(2), 0)  # log(pi / reference)
    logprobs = batch.sampler_logprobs
    reference = logprobs - log_ratio
    tokens = TokenOutputs(logprobs, torch.zeros_like(logprobs), logprobs, reference_logprobs=reference)
    algorithm = build_algorithm("grpo", {"kl.estimator": estimator, "kl.coefficient": 9.0})
    without = build_algorithm("grpo", {})
    weights = algorithm.compute_token_weights(batch, ModelOutputs(reference_logprobs=reference), kl_coef=0.1)
    plain = without.compute_loss(tokens, without.compute_token_weights(batch, ModelOutputs()))[0]
    added = algorithm.compute_loss(tokens, weights)[0] - plain
    k3 = (0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))
    per_token = {"k2": math.log(2) ** 2} | dict.fromkeys(("k3", "k3_plus", "k3_unbiased"), k3)
    assert added.item() == pytest.approx(0.1 * per_token[estimator] / 4)


MISMATCH = numbers(0.5, 4.0, 1.0, 1.1).log()  # pi_old / mu; the first turn 2.0, the first trajectory 2.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correction.rule": "truncate"}, (0.5, 2, 1, 1.1)),
        ({"correction.rule": "truncate", "correction.high": 1.05}, (0.5, 1.05, 1, 1.05)),
        ({"correction.rule": "window", "correction.low": 0.6, "correction.high": 5.0}, (0, 4, 1, 1.1)),
        ({"correction.level": "turn", "correction.high": 1.8}, (1.8, 1.8, 1, 1.1)),
        ({"correction.level": "trajectory", "correction.high": 3.0}, (2, 2, 2, 1.1)),
        ({"rejection.level": "token", "rejection.low": 0.9, "rejection.high": 1.2}, (0, 0, 1, 1)),
        ({"rejection.level": "turn", "rejection.high": 1.2}, (0, 0, 1, 1)),
        ({"rejection.level": "trajectory", "rejection.high": 1.3}, (1, 1, 1, 1)),  # 2^(1/3) = 1.26
        ({"rejection.level": "trajectory", "rejection.high": 1.3, "rejection.statistic": "product"}, (0, 0, 0, 1)),
        ({"correction.high": 3.0, "rejection.level": "turn", "rejection.high": 1.05}, (0, 0, 1, 0)),
    ],
)
def test_a_mismatch_of_sampler_and_trainer_gives_importance_weights(
    settings: dict[str, object], expected: tuple[float, ...], batch: TrainingBatch
) -> None:
    algorithm, plain = build_algorithm("grpo", settings), build_algorithm("grpo", {})
    assert algorithm.corrects_mismatch and not plain.corrects_mismatch
    mismatched = ModelOutputs(old_logprobs=batch.sampler_logprobs + MISMATCH)
    equal = ModelOutputs(old_logprobs=batch.sampler_logprobs)
    assert close(algorithm.compute_token_weights(batch, mismatched).importance_weight, numbers(*expected))
    assert close(algorithm.compute_token_weights(batch, equal).importance_weight, torch.ones(4))
    assert close(plain.compute_token_weights(batch, mismatched).importance_weight, torch.ones(4))


def test_importance_weights_apply_to_the_policy_loss_only(batch: TrainingBatch) -> None:
    def loss(algorithm: Algorithm) -> Tensor:
        old = batch.sampler_logprobs + MISMATCH
        tokens = TokenOutputs(old, torch.ones(4).double(), old, reference_logprobs=old - 0.5)
        outputs = ModelOutputs(old_logprobs=old, reference_logprobs=old - 0.5)
        return algorithm.compute_loss(tokens, algorithm.compute_token_weights(batch, outputs, kl_coef=0.1))[0]

    advantage = build_algorithm("grpo", {}).compute_token_weights(batch, ModelOutputs()).advantage
    others = {"kl.coefficient": 0.1, "entropy_coef": 0.01}
    difference = (numbers(0.5, 2, 1, 1.1) * -advantage).mean() - -advantage.mean()
    found = loss(build_algorithm("grpo", {**others, "correction.rule": "truncate"})) - loss(
        build_algorithm("grpo", others)
    )
    assert close(found, difference) and not close(found, torch.zeros(()))


def test_the_soft_overlong_penalty_is_the_papers() -> None:
    found = SoftOverlong(max_tokens=10, cache_tokens=4).penalties(numbers(5, 6, 7, 9, 10, 30))
    assert close(found, numbers(0, 0, -0.25, -0.75, -1, -1))  # L_max 10, L_cache 4: equation 13 of 2503.14476


def test_a_trajectory_is_penalized_for_its_own_action_tokens_beyond_the_limit(batch: TrainingBatch, make: Any) -> None:
    settings = {"shaping.overlong.max_tokens": 4, "shaping.overlong.cache_tokens": 2, "shaping.overlong.penalty": 0.5}
    algorithm = build_algorithm("dapo", settings)  # lengths 3 and 1; beside dapo's filter of constant groups
    assert "0.5 clip((|y| - 2) / 2, 0, 1)" in algorithm.shaping.formula
    shaped = algorithm.shaping.apply(batch)
    assert close(shaped.returns, numbers(2 - 0.25, 1)) and close(shaped.outcome_rewards, numbers(1.5 - 0.25, 1))
    observed = assemble_batch(samples_of(make), pack_prefix_tree, "all")  # with an observation between the turns
    assert len(observed.ids) > len(batch.ids) and close(algorithm.shaping.apply(observed).returns, shaped.returns)
    assert build_algorithm("dapo", {}).shaping.apply(batch) is batch
    with pytest.raises(InvalidInput, match="fewer cache_tokens than max_tokens"):
        build_algorithm("dapo", {"shaping.overlong.max_tokens": 512})


def test_a_bound_limits_k3_and_its_gradient() -> None:
    logprobs = numbers(-1.0, -9.0, -1.0).requires_grad_()
    reference = numbers(-1.5, -1.0, -30.0)  # k3: e^-0.5 - 0.5, e^8 - 9 and e^-29 + 28
    ratio = torch.ones(3, dtype=torch.float64)
    for estimator in ("k3", "k3_plus", "k3_unbiased"):
        bounded = Kl(estimator=estimator, bound=10.0).divergence(logprobs, reference, ratio)
        free = Kl(estimator=estimator).divergence(logprobs, reference, ratio)
        assert close(bounded, free.clamp(max=10)) and free[1] > 1000
        (gradient,) = torch.autograd.grad(bounded.sum(), logprobs)
        # k3_plus has the gradient of k2, log(pi / ref), whatever its value
        assert close(gradient[1:], numbers(-8, 29) if estimator == "k3_plus" else numbers(0, 0))
    with pytest.raises(InvalidInput, match=r"kl\.bound has no effect"):
        build_algorithm("grpo", {"kl.estimator": "k2", "kl.bound": 10.0})


@pytest.mark.parametrize(
    ("aggregation", "everything", "accepted"),
    [
        ("token_mean", (1 / 4,) * 4, (0, 0, 1 / 2, 1 / 2)),
        ("trajectory_mean", (1 / 6, 1 / 6, 1 / 6, 1 / 2), (0, 0, 0.5, 0.5)),
    ],
)
def test_rejected_tokens_stay_in_the_denominator_or_leave_it(
    aggregation: str, everything: tuple[float, ...], accepted: tuple[float, ...], batch: TrainingBatch
) -> None:
    settings = {"aggregation": aggregation, "rejection.level": "turn", "rejection.high": 1.2}
    mismatched = ModelOutputs(old_logprobs=batch.sampler_logprobs + MISMATCH)
    for denominator, expected in (("all", everything), ("accepted", accepted)):
        algorithm = build_algorithm("grpo", {**settings, "rejection.denominator": denominator})
        weights = algorithm.compute_token_weights(batch, mismatched)
        assert close(weights.loss_weight, numbers(*expected))
        assert close(weights.importance_weight, numbers(0, 0, 1, 1))


def test_accepted_tokens_without_a_loss_do_not_come_back(make: Any) -> None:
    batch = assemble_batch(samples_of(make), pack_prefix_tree, "all")
    excluded = replace(batch, loss_excluded=(None, "overlong"))
    algorithm = build_algorithm("grpo", {"rejection.level": "trajectory", "rejection.denominator": "accepted"})
    weights = algorithm.compute_token_weights(excluded, ModelOutputs(old_logprobs=batch.sampler_logprobs))
    assert batch.action_mask.tolist() == [True, True, False, True, True]  # the fourth token ends the first trajectory
    assert close(weights.loss_weight, numbers(1, 1, 0, 1, 0) / 3)


def observed_batch(make: Any, observations: Sequence[Sequence[int]], algorithm: Algorithm) -> TrainingBatch:
    """Return a batch of an attempt with these observations between three actions, and of another attempt."""
    actions = ([4, 5], [9], [12, 13, 14])
    rewards = {"score": 1.0, "steps": (0.1, 0.2, 0.3)}
    attempt = make.trajectory(make.chain(*zip(observations, actions, strict=True)), rewards)
    other = make.trajectory(make.chain(([1], [2, 3])), {"score": 0.0}, member=1)
    samples = select_trainable(make.groups(attempt, other), {}).samples
    return assemble_batch(samples, pack_prefix_tree, algorithm.token_scope)


def test_without_the_advantage_mask_observations_are_time_steps(make: Any) -> None:
    # tokens a a | o | a | o o | a a a: the outcome 1 + 0.3 is on the last one, 0.1 and 0.2 on the ends of turns
    algorithm = build_algorithm("reinforce++", {"advantage.gamma": 0.5, "masks.advantage": False, "kl": "none"})
    batch = observed_batch(make, ([1], [2], [3, 4]), algorithm)
    assert batch.ids.tolist() == [4, 5, 2, 9, 3, 4, 12, 13, 14, 2, 3]
    last = [1.3 / 4, 1.3 / 2, 1.3]
    second, third = 0.2 + last[0] / 8, last[0] / 4
    first = 0.1 + second / 4
    to_go = numbers(first / 2, first, second / 2, second, third, 2 * third, *last, 0, 0)
    weights = algorithm.compute_token_weights(batch, ModelOutputs())
    assert close(weights.advantage, (to_go - to_go.mean()) / to_go.std(), 1e-6)
    assert close(weights.loss_weight, batch.action_mask / 8)  # the loss mask still holds


def test_without_the_loss_mask_observations_have_loss_weights(make: Any) -> None:
    algorithm = build_algorithm("grpo", {"masks.loss": False})
    batch = observed_batch(make, ([1], [2], [3]), algorithm)
    weights = algorithm.compute_token_weights(batch, ModelOutputs())
    assert batch.action_mask.sum() == 8 and len(batch.ids) == 10
    assert weights.loss_weight.tolist() == pytest.approx([0.1] * 10)
    high = 1.6 / 2 / (1.6 / 2**0.5)
    assert weights.advantage.tolist() == pytest.approx([high] * 8 + [-high] * 2, rel=1e-5)
    masked = build_algorithm("grpo", {}).compute_token_weights(batch, ModelOutputs())  # control
    assert close(masked.loss_weight, batch.action_mask / 8)
