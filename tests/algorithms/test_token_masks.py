"""Token masks, KL-Cov and the off-policy sequence mask: against second derivations, and in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning import with_recorded_logprobs
from tensors import close, numbers, units
from torch import Tensor
from updating import make_updater, update

from agent_r1.algorithms.loss_terms import ClipCov, KlCov, OffPolicyMask, SecondMoment, TopEntropy
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, TokenOutputs, TokenWeights
from agent_r1.core.trajectory import Group
from agent_r1.data.batch import TrainingBatch, assemble_batch, segment_sum, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


@pytest.fixture
def batch(make: Any) -> TrainingBatch:
    return assemble_batch(select_trainable(make.random_groups(5), {}).samples, pack_prefix_tree)


def random_column(batch: TrainingBatch, seed: int) -> Tensor:
    return torch.randn(len(batch.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_second_moment_is_cut_by_masking_the_furthest_tokens_one_by_one(batch: TrainingBatch) -> None:
    moved = 0.3 * random_column(batch, 0)
    outputs = ModelOutputs(old_logprobs=batch.sampler_logprobs + moved)
    left = dict(enumerate(moved.square().tolist()))
    while math.fsum(left.values()) / len(left) > 0.04:
        del left[max(left, key=lambda place: left[place])]
    kept = SecondMoment(threshold=0.04).kept(batch, outputs, moved)
    assert kept.nonzero().squeeze(1).tolist() == sorted(left) and 0 < len(left) < len(moved)
    assert SecondMoment(threshold=10.0).kept(batch, outputs, moved).all()  # as without a mask
    same = ModelOutputs(old_logprobs=batch.sampler_logprobs + 1)
    assert SecondMoment(threshold=1.0).kept(batch, same, moved).all()  # exactly at the threshold


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_top_entropy_is_the_quantile_of_the_entropy(share: float, batch: TrainingBatch) -> None:
    entropy = random_column(batch, 1).abs()
    kept = TopEntropy(share=share).kept(batch, ModelOutputs(entropy=entropy), entropy)
    assert kept.tolist() == (entropy >= torch.quantile(entropy, 1 - share)).tolist()
    assert int(kept.sum()) == pytest.approx(share * len(entropy), abs=1.01)


def test_tokens_of_equal_entropy_are_kept_together(batch: TrainingBatch) -> None:
    entropy = numbers(0, 1, 1 - 1e-12, 1 + 1e-13, 1)
    kept = TopEntropy(share=0.5).kept(batch, ModelOutputs(entropy=entropy), entropy)
    assert kept.tolist() == [False, True, True, True, True]


def covariances(batch: TrainingBatch, advantage: Tensor) -> list[float]:
    logprobs, count = batch.sampler_logprobs.tolist(), len(batch.ids)
    mean_a, mean_l = math.fsum(advantage.tolist()) / count, math.fsum(logprobs) / count
    return [(a - mean_a) * (one - mean_l) for a, one in zip(advantage.tolist(), logprobs, strict=True)]


def test_clip_cov_masks_its_share_of_the_tokens_in_the_window(batch: TrainingBatch) -> None:
    batch = replace(batch, sampler_logprobs=-random_column(batch, 2).abs())
    advantage = 3 * random_column(batch, 3)
    inside = [1 < one < 5 for one in covariances(batch, advantage)]
    for share, expected in ((1e-4, 1), (0.1, int(0.1 * len(inside))), (0.99, sum(inside))):
        kept = ClipCov(share=share).kept(batch, ModelOutputs(), advantage)
        assert int((~kept).sum()) == expected
        assert all(within for within, one in zip(inside, kept.tolist(), strict=True) if not one)
    assert ClipCov(low=100.0, high=200.0).kept(batch, ModelOutputs(), advantage).all()


@pytest.mark.parametrize("rule", ["clip-cov", "kl-cov"])
def test_covariances_are_of_the_policy_before_the_update_and_of_centered_advantages(
    rule: str, batch: TrainingBatch
) -> None:
    old, advantage = -random_column(batch, 2).abs(), random_column(batch, 3)
    rising = replace(batch, sampler_logprobs=torch.arange(len(old)).double() - len(old))

    def weight(batch: TrainingBatch, outputs: ModelOutputs, shift: float = 0.0) -> list[float]:
        if rule == "kl-cov":
            return KlCov(share=0.2).weight(batch, outputs, advantage + shift).tolist()
        return ClipCov(share=0.9, low=0.1).kept(batch, outputs, advantage + shift).tolist()

    expected = weight(replace(batch, sampler_logprobs=old), ModelOutputs())
    assert weight(rising, ModelOutputs(old_logprobs=old)) == expected != weight(rising, ModelOutputs())
    assert weight(rising, ModelOutputs(old_logprobs=old), shift=5.0) == expected


def test_kl_cov_pulls_back_tokens_that_fell_as_tokens_that_rose() -> None:
    old, moved = numbers(-1, -1, -1), numbers(0.5, -0.5, 0)
    tokens = TokenOutputs((old + moved).requires_grad_(), torch.zeros(3), old)
    weights = TokenWeights(numbers(0, 0, 0), numbers(0.5, 0.25, 0.25), torch.ones(3), drift_weight=numbers(2, 2, 2))
    loss, _ = build_algorithm("kl-cov", {}).compute_loss(tokens, weights)
    assert loss.item() == pytest.approx(0.5 * 2 * 0.5 + 0.25 * 2 * 0.5)
    assert torch.autograd.grad(loss, tokens.logprobs)[0].tolist() == [1.0, -0.5, 0.0]


def test_kl_cov_penalizes_the_tokens_of_largest_covariance(batch: TrainingBatch) -> None:
    batch = replace(batch, sampler_logprobs=-random_column(batch, 2).abs())
    advantage = random_column(batch, 3)
    ranked = sorted(range(len(advantage)), key=covariances(batch, advantage).__getitem__)
    for share, count in ((1e-4, 1), (0.25, int(0.25 * len(advantage))), (1.0, len(advantage))):
        weight = KlCov(share=share, coefficient=0.5).weight(batch, ModelOutputs(), advantage)
        assert weight.nonzero().squeeze(1).tolist() == sorted(ranked[-count:])
        assert set(weight.tolist()) <= {0.0, 0.5}


def test_off_policy_sequences_keep_their_good_actions_only() -> None:
    trajectory = units(0, 0, 1, 1, 2)
    sampler, logprobs = numbers(-1, -1, -1, -1, -1), numbers(-1.2, -2.0, -1.2, -1.5, -3.0)
    tokens = TokenOutputs(logprobs, torch.zeros(5), sampler, sampler_logprobs=sampler, trajectory=trajectory)
    # means of log(mu / pi): 0.6, 0.35, 2
    kept = OffPolicyMask(threshold=0.5).kept(numbers(-1, 1, -1, -1, 0), tokens)
    assert kept.tolist() == [False, True, True, True, True]
    exact = replace(tokens, logprobs=numbers(-1.5, -1.5, -1.5, -1.5, -3.0))  # means 0.5, 0.5, 2
    assert OffPolicyMask(threshold=0.5).kept(numbers(-1, 1, -1, -1, -1), exact).tolist() == [True] * 4 + [False]
    # mu is the sampler's policy, also if the denominator of the ratio is another one
    moved = replace(tokens, old_logprobs=logprobs)
    assert OffPolicyMask(threshold=0.5).kept(numbers(-1, 1, -1, -1, 0), moved).tolist() == kept.tolist()


def test_off_policy_sequences_are_whole_attempts_not_turns(make: Any) -> None:
    # the first turn of the bad attempt is far from the sampler, but not the attempt: its second turn makes up for it
    def loss(first: float, second: float, rule: dict[str, object]) -> float:
        near = with_recorded_logprobs(make.model(), make.groups(*attempts), 1.0)[0]
        bad, good = near.trajectories
        turns = tuple(
            replace(turn, logprobs=tuple(one + shift for one in turn.logprobs))
            for turn, shift in zip(bad.turns, (first, second), strict=True)
        )
        groups = [replace(near, trajectories=(replace(bad, turns=turns), good))]
        algorithm = build_algorithm("grpo", {"loss": "policy_gradient", **rule})
        updater = make_updater(make.model(), algorithm, micro_tokens=2)  # fewer than an attempt has
        return update(updater, groups).metrics["policy_loss"]

    attempts = [  # two turns without a shared prefix: two sequences
        make.trajectory(
            [make.turn(0, [1], [2 + member]), make.turn(1, [3], [4])], {"score": float(member)}, member=member
        )
        for member in range(2)
    ]
    rule: dict[str, object] = {"off_policy_mask.threshold": 0.5}
    assert loss(2.0, -2.0, rule) == pytest.approx(loss(0.0, 0.0, {}), abs=1e-6)
    assert abs(loss(2.0, 0.0, rule) - loss(0.0, 0.0, {})) > 1e-2  # control: now the mean is 1


SETTINGS: Mapping[str, Mapping[str, object]] = {
    "top_entropy": {"token_mask": "top_entropy", "token_mask.share": 0.3},
    "second_moment": {"token_mask": "second_moment", "token_mask.threshold": 0.01},
    "clip_cov": {"token_mask": "clip_cov", "token_mask.low": 0.0, "token_mask.high": 50.0, "token_mask.share": 0.5},
    "kl_cov": {"kl_cov.share": 0.5, "epochs": 2},
    "off_policy_mask": {"off_policy_mask.threshold": 1e-4},
}


def recorded(make: Any) -> list[Group]:
    """Return attempts that a sampler close to the policy made."""
    return with_recorded_logprobs(make.model(seed=0, spread=0.21), make.random_groups(0), 1.0)


@pytest.mark.parametrize("rule", SETTINGS)
def test_rules_combine_with_estimators_and_losses_and_change_what_is_trained(rule: str, make: Any) -> None:
    found = []
    for settings in ({key: value for key, value in SETTINGS[rule].items() if key == "epochs"}, SETTINGS[rule]):
        algorithm = build_algorithm("ppo", settings)
        updater = make_updater(make.model(), algorithm, learning_rate=1e-2, micro_tokens=40)
        reports = [update(updater, recorded(make)) for _ in range(2)]
        assert all(math.isfinite(value) for report in reports for value in report.metrics.values())
        found.append(torch.cat([weight.flatten() for weight in updater.publish().handle.state_dict().values()]))
    assert not close(found[0], found[1], 1e-6)


def test_masked_tokens_count_in_the_denominators(batch: TrainingBatch) -> None:
    outputs = ModelOutputs(entropy=random_column(batch, 1))
    masked = build_algorithm("grpo", {"token_mask": "top_entropy"}).compute_token_weights(batch, outputs)
    plain = build_algorithm("grpo", {}).compute_token_weights(batch, outputs)
    assert torch.equal(masked.loss_weight, plain.loss_weight)
    assert 0 < segment_sum(masked.importance_weight, torch.zeros_like(batch.ids)).item() < len(batch.ids)


def test_tokens_without_a_loss_are_not_compared(batch: TrainingBatch) -> None:
    excluded = replace(batch, loss_excluded=("overlong", *batch.loss_excluded[1:]))
    absent = batch.token_trajectory == 0
    entropy = random_column(batch, 1).abs() + 10 * absent
    weights = build_algorithm("grpo", {"token_mask": "top_entropy"}).compute_token_weights(
        excluded, ModelOutputs(entropy=entropy)
    )
    kept = (weights.importance_weight > 0)[~absent]
    assert kept.tolist() == TopEntropy().kept(batch, ModelOutputs(entropy=entropy[~absent]), entropy).tolist()
    assert kept.any()
