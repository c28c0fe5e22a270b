"""P8: policy losses equal the policy gradient on-policy, and each other in the cases in which they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.ops import aggregation_weights, importance_ratio
from agent_r1.algorithms.policy_losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    ImportanceSampling,
    Ipo,
    PolicyGradient,
    PolicyLoss,
    Sapo,
    Topr,
    Vespo,
)
from agent_r1.algorithms.types import Level, TokenOutputs
from agent_r1.data.batch import segment_count, segment_mean, segment_sum


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens (n,) of units of given lengths: old log-probability, log-ratio and advantage of each."""

    unit: Tensor
    old: Tensor
    log_ratio: Tensor
    advantage: Tensor

    @property
    def with_unit_advantage(self) -> Tokens:
        """The same tokens with one advantage per unit."""
        return replace(self, advantage=segment_mean(self.advantage, self.unit)[self.unit])

    @property
    def on_policy(self) -> Tokens:
        """The same tokens with ratio 1."""
        return replace(self, log_ratio=torch.zeros_like(self.log_ratio))

    @property
    def single(self) -> Tokens:
        """The same tokens in units of one token."""
        return replace(self, unit=torch.arange(len(self.unit)))


def _tokens(lengths: list[int], seed: int, spread: float) -> Tokens:
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    draw = torch.randn(3, len(unit), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Tokens(unit, -draw[0].abs() - 0.1, spread * draw[1], draw[2])


LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TOKENS = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.sampled_from([0.05, 0.5]))
NEAR = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.just(0.05))

LossFn = Callable[[Tensor, Tensor, TokenOutputs], Tensor]
"""(ratio (n,), advantage (n,), outputs of the tokens) -> the loss of each token (n,)."""


def unit_mean(unit: Tensor) -> Tensor:
    return aggregation_weights(unit, "trajectory_mean")


def loss_and_gradient(loss: LossFn, tokens: Tokens, level: Level) -> tuple[Tensor, Tensor]:
    """Return the mean over units of the mean over tokens of the loss, and its gradient by each log-probability."""
    logprobs = (tokens.old + tokens.log_ratio).requires_grad_()
    ratio = importance_ratio(logprobs, tokens.old, None if level == "token" else tokens.unit)
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs), tokens.old, tokens.unit)
    total = (unit_mean(tokens.unit) * loss(ratio, tokens.advantage, outputs)).sum()
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


# on-policy

LOSSES: tuple[PolicyLoss, ...] = (
    Clip(),
    Clip(clip_low=3e-4, clip_high=4e-4, dual_clip=None),
    PolicyGradient(),
    ImportanceSampling(),
    ImportanceSampling(max_ratio=2.0),
    Cispo(),
    Topr(),
    Sapo(),
    Dppo(),
    Gmpo(),
    Vespo(),
    Ipo(),
)
CASES = [(loss, level) for loss in LOSSES for level in sorted(loss.levels)]


def equals_policy_gradient_on_policy(loss: LossFn, tokens: Tokens, level: Level) -> None:
    _, gradient = loss_and_gradient(loss, tokens.on_policy, level)
    assert close(gradient, -tokens.advantage * unit_mean(tokens.unit))


@pytest.mark.parametrize(("loss", "level"), CASES, ids=[f"{loss.name}-{level}" for loss, level in CASES])
def test_on_policy_every_loss_has_the_policy_gradient(loss: PolicyLoss, level: Level) -> None:
    holds(equals_policy_gradient_on_policy, loss.compute, TOKENS, st.just(level), count=6)


def gate_without_its_scale(ratio: Tensor, advantage: Tensor, outputs: TokenOutputs) -> Tensor:
    """Wrong: SAPO's sigmoid without 4 / tau."""
    return -advantage * torch.sigmoid(1.05 * (ratio - 1))


def mean_over_the_padded_width(ratio: Tensor, advantage: Tensor, outputs: TokenOutputs) -> Tensor:
    """Wrong: GMPO's mean is taken over the width of the micro-batch, not over the unit's tokens."""
    assert outputs.ratio_unit is not None
    log_ratio = outputs.logprobs - outputs.old_logprobs
    mean = segment_sum(log_ratio, outputs.ratio_unit) / segment_count(outputs.ratio_unit).max()
    return -advantage * mean[outputs.ratio_unit].exp()


@pytest.mark.parametrize("wrong", [gate_without_its_scale, mean_over_the_padded_width])
def test_another_gradient_on_policy_is_detected(wrong: LossFn) -> None:
    rejected(equals_policy_gradient_on_policy, wrong, TOKENS, st.just("trajectory"))


# ratio levels

SequenceLoss = Callable[[Tokens], tuple[Tensor, Tensor]]
"""Returns the loss and its gradient by each log-probability (n,)."""
WIDE = Clip(clip_low=0.2, clip_high=0.28)


def equals_ppo_with_units_of_one_token(sequence_loss: SequenceLoss, tokens: Tokens) -> None:
    loss, gradient = sequence_loss(tokens.single)
    expected = loss_and_gradient(WIDE.compute, tokens.single, "token")
    assert close(loss, expected[0]) and close(gradient, expected[1])


def has_the_gradient_of_the_sequence_ratio(sequence_loss: SequenceLoss, tokens: Tokens) -> None:
    """With one advantage per unit GSPO-token's gradient is GSPO's (2507.18071, section 4.3)."""
    logprobs = (tokens.old + tokens.log_ratio).requires_grad_()
    ratio = segment_mean(logprobs - tokens.old, tokens.unit).exp()
    advantage = segment_mean(tokens.advantage, tokens.unit)
    clipped = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.28))
    dual = torch.where(advantage < 0, torch.maximum(clipped, 3 * advantage), clipped)
    loss, gradient = sequence_loss(tokens.with_unit_advantage)
    assert close(loss, -dual.mean().detach())
    assert close(gradient, torch.autograd.grad(-dual.mean(), logprobs)[0])


def our_sequence_loss(tokens: Tokens) -> tuple[Tensor, Tensor]:
    return loss_and_gradient(WIDE.compute, tokens, "trajectory")


def ratio_of_each_token(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Wrong for a sequence: each token has its own ratio."""
    return loss_and_gradient(WIDE.compute, tokens, "token")


def length_off_by_one(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Wrong: the geometric mean uses a length that is off by one, as if the end token were not counted."""
    count = segment_count(tokens.unit)
    off = replace(tokens, log_ratio=tokens.log_ratio * ((1 + count) / count)[tokens.unit])
    return loss_and_gradient(WIDE.compute, off, "trajectory")


def test_ratios_of_units() -> None:
    holds(equals_ppo_with_units_of_one_token, our_sequence_loss, TOKENS)
    holds(has_the_gradient_of_the_sequence_ratio, our_sequence_loss, TOKENS)
    rejected(equals_ppo_with_units_of_one_token, length_off_by_one, TOKENS)
    rejected(has_the_gradient_of_the_sequence_ratio, ratio_of_each_token, TOKENS)


def equals_gspo_if_nothing_is_clipped(geometric: LossFn, tokens: Tokens) -> None:
    free = Clip(clip_low=0.999, clip_high=1e6, dual_clip=None)
    found = loss_and_gradient(geometric, tokens.with_unit_advantage, "trajectory")
    expected = loss_and_gradient(free.compute, tokens.with_unit_advantage, "trajectory")
    assert close(found[0], expected[0]) and close(found[1], expected[1])


def test_gmpo_equals_gspo_if_nothing_is_clipped() -> None:
    holds(equals_gspo_if_nothing_is_clipped, Gmpo().compute, NEAR)
    rejected(equals_gspo_if_nothing_is_clipped, mean_over_the_padded_width, NEAR)


# clipping

FAR = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.sampled_from([0.3, 2.0]))


def dual_clip_acts_on_negative_advantages_with_large_ratios(bounded: LossFn, tokens: Tokens) -> None:
    """There the loss is -c A, without gradient; elsewhere it is unchanged."""
    ratio = tokens.log_ratio.exp()
    acts = (tokens.advantage < 0) & (ratio > 3.0)
    found = loss_and_gradient(bounded, tokens.single, "token")
    without = loss_and_gradient(Clip(dual_clip=None).compute, tokens.single, "token")
    excess = torch.where(acts, -tokens.advantage * (ratio - 3.0), 0.0)
    assert close(found[0], without[0] - (unit_mean(tokens.single.unit) * excess).sum())
    assert close(found[1], torch.where(acts, 0.0, without[1]))


def bounded_for_every_sign(ratio: Tensor, advantage: Tensor, outputs: TokenOutputs) -> Tensor:
    """Wrong: the bound is applied if A > 0 too."""
    return torch.minimum(Clip(dual_clip=None).compute(ratio, advantage, outputs), -advantage * 3.0)


def test_the_dual_clip() -> None:
    holds(dual_clip_acts_on_negative_advantages_with_large_ratios, Clip(dual_clip=3.0).compute, FAR)
    rejected(dual_clip_acts_on_negative_advantages_with_large_ratios, bounded_for_every_sign, FAR)


def has_no_gradient_in_exactly_the_clipped_region(loss: LossFn, tokens: Tokens) -> None:
    """PPO: no gradient if A > 0 and r > 1 + high, or A < 0 and r < 1 - low; -A r everywhere else."""
    ratio, advantage = tokens.log_ratio.exp(), tokens.advantage
    clipped = torch.where(advantage > 0, ratio > 1.28, ratio < 0.8)
    expected = torch.where(clipped, 0.0, -advantage * ratio) * unit_mean(tokens.single.unit)
    assert close(loss_and_gradient(loss, tokens.single, "token")[1], expected)


def clip_without_minimum(ratio: Tensor, advantage: Tensor, outputs: TokenOutputs) -> Tensor:
    """Wrong: without the minimum a token that moved far in the wrong direction never comes back."""
    return -advantage * ratio.clamp(0.8, 1.28)


def test_ppo_has_no_gradient_in_exactly_its_clipped_region() -> None:
    ours = Clip(clip_low=0.2, clip_high=0.28, dual_clip=None).compute
    holds(has_no_gradient_in_exactly_the_clipped_region, ours, FAR)
    rejected(has_no_gradient_in_exactly_the_clipped_region, clip_without_minimum, FAR)
