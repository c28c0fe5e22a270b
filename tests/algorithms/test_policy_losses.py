"""Policy losses: by hand, against a second derivation of their formulas, and at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops import importance_ratio
from agent_r1.algorithms.policy_losses import Clip, Gmpo, ImportanceSampling, Ipo, PolicyLoss, Sapo, Vespo
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import TokenOutputs, TokenWeights

UNIT = units(0, 0, 0, 1, 2, 2)
ADVANTAGE = numbers(1.5, 1.5, 1.5, -2.0, -0.5, -0.5)


def tokens_of(logprobs: Tensor, old_logprobs: Tensor, unit: Tensor | None = None) -> TokenOutputs:
    return TokenOutputs(logprobs, torch.zeros_like(logprobs), old_logprobs, unit)


def loss_at(loss: PolicyLoss, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss at given importance ratios."""
    return loss.compute(ratio, advantage, tokens_of(ratio.log(), torch.zeros_like(ratio)))


@pytest.fixture
def tokens() -> TokenOutputs:
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=random, dtype=torch.float64) - 0.5
    moved = numbers(0.3, -0.4, 0.05, 0.6, -0.01, -0.7)
    return tokens_of((old + moved).requires_grad_(), old, UNIT)


def ratio_of(tokens: TokenOutputs) -> Tensor:
    return importance_ratio(tokens.logprobs, tokens.old_logprobs, tokens.ratio_unit)


def gradient(loss: Tensor, tokens: TokenOutputs) -> Tensor:
    return torch.autograd.grad(loss.sum(), tokens.logprobs)[0]


def test_clipping_by_hand() -> None:
    ratio, advantage = numbers(1.5, 1.5, 0.5, 0.5, 1.0), numbers(1, -1, 1, -1, 2)
    found = loss_at(Clip(clip_low=0.2, clip_high=0.3, dual_clip=None), ratio, advantage)
    assert close(found, numbers(-1.3, 1.5, -0.5, 0.8, -2.0))


def test_the_dual_clip_is_the_two_sided_clip() -> None:
    # INTELLECT-2 (2505.07291, section 4.1), delta in TRL: min(min(r, delta) A, clip(r) A)
    ratio = torch.linspace(0.01, 8, 200, dtype=torch.float64)
    for delta, sign in ((1.5, 1.0), (1.5, -1.0), (4.0, 1.0), (4.0, -1.0)):
        advantage = torch.full_like(ratio, sign)
        two_sided = -torch.minimum(ratio.clamp(max=delta) * advantage, ratio.clamp(0.8, 1.3) * advantage)
        assert close(loss_at(Clip(clip_high=0.3, dual_clip=delta), ratio, advantage), two_sided)


def test_the_soft_gate_by_hand() -> None:
    # at r = 1 the sigmoid is 1/2: -(4 / tau) / 2 A; at r = 2 and tau 1 it is 1 / (1 + 1/e)
    found = loss_at(Sapo(tau_positive=2.0, tau_negative=1.0), numbers(1, 2), numbers(3, -1))
    assert close(found, numbers(-3, 4 / (1 + math.exp(-1))))


def test_gmpo_by_hand_and_with_the_gradient_of_its_unit() -> None:
    logprobs = numbers(0.6, -0.2, 0.1, -0.5).requires_grad_()
    tokens = tokens_of(logprobs, torch.zeros_like(logprobs), units(0, 0, 1, 1))
    loss = Gmpo(clip_log_ratio=0.4).compute(logprobs.exp(), numbers(1, 1, -2, -2), tokens)
    # first unit: 0.6 counts 0.4, mean 0.1; second: -0.5 counts -0.4, mean -0.15
    assert close(loss, numbers(-math.exp(0.1), -math.exp(0.1), 2 * math.exp(-0.15), 2 * math.exp(-0.15)))
    of_units = -math.exp((0.4 - 0.2) / 2) / 2, 2 * math.exp((0.1 - 0.4) / 2) / 2  # d/dx of A exp((x + y) / 2)
    assert close(gradient(loss / 2, tokens), numbers(0, of_units[0], of_units[1], 0))


def test_an_importance_weight_is_not_differentiated() -> None:
    tokens = tokens_of(numbers(-1, -2).requires_grad_(), numbers(0, 0))
    loss = ImportanceSampling().compute(tokens.logprobs.exp(), numbers(3, -1), tokens)
    assert close(loss, numbers(3 * math.exp(-1), -2 * math.exp(-2)))
    assert close(gradient(loss, tokens), numbers(-3 * math.exp(-1), math.exp(-2)))


def test_vespo_weighs_the_policy_gradient_of_each_trajectory_by_its_gamma_kernel(tokens: TokenOutputs) -> None:
    expected = []
    for trajectory, (sign_k, sign_l) in enumerate(((2, 3), (3, 2), (3, 2))):
        mine = [place for place in range(6) if UNIT[place] == trajectory]
        moved = (tokens.logprobs.detach() - tokens.old_logprobs)[mine].tolist()
        product = math.exp(math.fsum(moved))
        kernel = math.exp(sign_l) * product**sign_k * math.exp(-sign_l * product)  # e^l W^k e^(-l W)
        expected += [-kernel * float(ADVANTAGE[place]) for place in mine]
    assert close(gradient(Vespo().compute(ratio_of(tokens), ADVANTAGE, tokens), tokens), numbers(*expected))
    flat = Vespo(power_positive=0, power_negative=0, decay_positive=1e-12, decay_negative=1e-12)
    assert close(gradient(flat.compute(ratio_of(tokens), ADVANTAGE, tokens), tokens), -ADVANTAGE)


def test_vespo_stays_finite_for_trajectories_that_moved_too_far() -> None:
    for moved in (-500.0, 500.0):
        tokens = tokens_of(numbers(moved, 0.0), numbers(0, 0), units(0, 0))
        found = Vespo().compute(ratio_of(tokens), numbers(1, -1), tokens)
        assert found.isfinite().all() and found.abs().max() < 1e-9 * abs(moved)


def test_ipo_keeps_the_ratio_of_near_tokens_and_pulls_all_back(tokens: TokenOutputs) -> None:
    moved = (tokens.logprobs - tokens.old_logprobs).detach()
    change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    expected = torch.where(change.abs() <= 0.1, -ADVANTAGE * moved.exp(), 0.0) + 0.5 * 2 * moved
    alone = tokens_of(tokens.logprobs, tokens.old_logprobs)
    loss = Ipo(threshold=0.1, drift_coef=0.5)
    assert close(gradient(loss.compute(ratio_of(alone), ADVANTAGE, alone), alone), expected)
    assert loss.clipped_mask(ratio_of(alone), ADVANTAGE, alone).tolist() == (change.abs() > 0.1).tolist()
    assert 0 < int((change.abs() > 0.1).sum()) < 6  # control
    half = tokens_of(numbers(0.0), numbers(0.5).log())  # exactly at the threshold
    assert Ipo(threshold=0.5).clipped_mask(ratio_of(half), numbers(1), half).tolist() == [False]


def test_luspo_is_gspo_with_each_trajectory_weighted_by_its_length(tokens: TokenOutputs) -> None:
    moved = tokens.logprobs.detach() - tokens.old_logprobs
    sequence_ratio = [float(moved[unit == UNIT].mean().exp()) for unit in range(3)]
    clipped = [min(max(ratio, 1 - 2e-3), 1 + 2.5e-3) for ratio in sequence_ratio]
    advantage = [float(ADVANTAGE[unit == UNIT][0]) for unit in range(3)]
    losses = [-min(r * a, c * a) for r, c, a in zip(sequence_ratio, clipped, advantage, strict=True)]
    expected = sum(loss * length for loss, length in zip(losses, (3, 1, 2), strict=True)) / 3
    weights = TokenWeights(ADVANTAGE, torch.full((6,), 1 / 3, dtype=torch.float64), torch.ones(6))
    assert ALGORITHMS["luspo"].compute_loss(tokens, weights)[0].item() == pytest.approx(expected)
