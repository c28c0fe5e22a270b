"""Policy losses by hand, and their gradient on-policy."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops import clipped_value_loss, importance_ratio
from agent_r1.algorithms.policy_losses import Clip, Gmpo, ImportanceSampling, PolicyLoss, Sapo
from agent_r1.algorithms.types import TokenOutputs


def tokens_of(logprobs: Tensor, old_logprobs: Tensor, unit: Tensor | None = None) -> TokenOutputs:
    return TokenOutputs(logprobs, torch.zeros_like(logprobs), old_logprobs, unit)


def loss_at(loss: PolicyLoss, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss at given importance ratios."""
    return loss.compute(ratio, advantage, tokens_of(ratio.log(), torch.zeros_like(ratio)))


def test_clipping_by_hand() -> None:
    ratio, advantage = numbers(1.5, 1.5, 0.5, 0.5, 1.0), numbers(1, -1, 1, -1, 2)
    found = loss_at(Clip(clip_low=0.2, clip_high=0.3, dual_clip=None), ratio, advantage)
    assert close(found, numbers(-1.3, 1.5, -0.5, 0.8, -2.0))


def test_the_dual_clip_acts_only_if_the_advantage_is_negative_and_the_ratio_large() -> None:
    ratio, advantage = numbers(5.0, 5.0, 2.0), numbers(-1, 1, -1)
    assert loss_at(Clip(dual_clip=None), ratio, advantage).tolist() == [5.0, -1.2, 2.0]
    assert loss_at(Clip(dual_clip=3.0), ratio, advantage).tolist() == [3.0, -1.2, 2.0]


def test_the_soft_gate_by_hand() -> None:
    # at r = 1 the sigmoid is 1/2: -(4 / tau) / 2 A; at r = 2 and tau 1 it is 1 / (1 + 1/e)
    loss = Sapo(tau_positive=2.0, tau_negative=1.0)
    found = loss_at(loss, numbers(1, 2), numbers(3, -1))
    assert close(found, numbers(-3, 4 / (1 + math.exp(-1))))


def test_gmpo_by_hand_and_with_the_gradient_of_its_unit() -> None:
    logprobs = numbers(0.6, -0.2, 0.1, -0.5).requires_grad_()
    advantage, unit = numbers(1, 1, -2, -2), units(0, 0, 1, 1)
    tokens = tokens_of(logprobs, torch.zeros_like(logprobs), unit)
    loss = Gmpo(clip_log_ratio=0.4).compute(logprobs.exp(), advantage, tokens)
    # first unit: 0.6 counts 0.4, mean 0.1; second: -0.5 counts -0.4, mean -0.15
    assert close(loss, numbers(-math.exp(0.1), -math.exp(0.1), 2 * math.exp(-0.15), 2 * math.exp(-0.15)))
    (gradient,) = torch.autograd.grad(loss.sum() / 2, logprobs)
    of_units = -math.exp((0.4 - 0.2) / 2) / 2, 2 * math.exp((0.1 - 0.4) / 2) / 2  # d/dx of A exp((x + y) / 2)
    assert close(gradient, numbers(0, of_units[0], of_units[1], 0))


def test_an_importance_weight_is_not_differentiated() -> None:
    logprobs = numbers(-1, -2).requires_grad_()
    tokens = tokens_of(logprobs, numbers(0, 0))
    loss = ImportanceSampling().compute(logprobs.exp(), numbers(3, -1), tokens)
    assert close(loss, numbers(3 * math.exp(-1), -2 * math.exp(-2)))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert close(gradient, numbers(-3 * math.exp(-1), math.exp(-2)))


@pytest.mark.parametrize(
    ("loss", "of_unit"),
    [(Clip(), False), (Clip(), True), (Sapo(), False), (Gmpo(), True), (ImportanceSampling(), False)],
    ids=["clip", "clip of units", "sapo", "gmpo", "importance sampling"],
)
def test_on_policy_every_loss_has_the_policy_gradient(loss: PolicyLoss, of_unit: bool) -> None:
    logprobs = torch.randn(7, dtype=torch.float64).requires_grad_()
    old, unit = logprobs.detach(), units(0, 0, 0, 1, 1, 2, 2)
    advantage = torch.randn(3, dtype=torch.float64)[unit]
    tokens = tokens_of(logprobs, old, unit if of_unit else None)
    total = loss.compute(importance_ratio(logprobs, old, tokens.ratio_unit), advantage, tokens).sum()
    (found,) = torch.autograd.grad(total, logprobs)
    assert close(found, -advantage)


def test_value_loss_by_hand() -> None:
    values, old, target = numbers(1.0, 1.0, 0.3), numbers(0.0, 0.0, 0.2), numbers(1.0, -1.0, 0.0)
    # clipped to 0.5: 0.5 from 1, and for -1 the unclipped one is worse; within the clip both are equal
    assert close(clipped_value_loss(values, old, target, 0.5), numbers(0.5 * 0.25, 0.5 * 4, 0.5 * 0.09))
