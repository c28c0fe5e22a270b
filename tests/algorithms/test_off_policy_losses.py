"""Losses for off-policy samples: against a second derivation of their formulas, and at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops import importance_ratio
from agent_r1.algorithms.policy_losses import Clip, Ipo, PolicyLoss, Vespo
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import TokenOutputs, TokenWeights

UNIT = units(0, 0, 0, 1, 2, 2)
ADVANTAGE = numbers(1.5, 1.5, 1.5, -2.0, -0.5, -0.5)


@pytest.fixture
def tokens() -> TokenOutputs:
    """Return tokens of three trajectories, half of them far from the old policy."""
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=random, dtype=torch.float64) - 0.5
    moved = numbers(0.3, -0.4, 0.05, 0.6, -0.01, -0.7)
    return TokenOutputs((old + moved).requires_grad_(), torch.zeros(6), old, UNIT)


def gradient(loss: Tensor, tokens: TokenOutputs) -> Tensor:
    return torch.autograd.grad(loss.sum(), tokens.logprobs)[0]


def ratio_of(tokens: TokenOutputs) -> Tensor:
    return importance_ratio(tokens.logprobs, tokens.old_logprobs, tokens.ratio_unit)


def test_vespo_weighs_the_policy_gradient_of_each_trajectory_by_its_gamma_kernel(tokens: TokenOutputs) -> None:
    loss = Vespo()
    expected = []
    for trajectory, (sign_k, sign_l) in enumerate(((2, 3), (3, 2), (3, 2))):
        mine = [place for place in range(6) if UNIT[place] == trajectory]
        moved = (tokens.logprobs.detach() - tokens.old_logprobs)[mine].tolist()
        product = math.exp(math.fsum(moved))
        kernel = math.exp(sign_l) * product**sign_k * math.exp(-sign_l * product)  # e^l W^k e^(-l W)
        expected += [-kernel * float(ADVANTAGE[place]) for place in mine]
    assert close(gradient(loss.compute(ratio_of(tokens), ADVANTAGE, tokens), tokens), numbers(*expected))


def test_vespo_without_power_and_with_little_decay_is_the_policy_gradient(tokens: TokenOutputs) -> None:
    flat = Vespo(power_positive=0, power_negative=0, decay_positive=1e-12, decay_negative=1e-12)
    assert close(gradient(flat.compute(ratio_of(tokens), ADVANTAGE, tokens), tokens), -ADVANTAGE)


def test_vespo_stays_finite_for_trajectories_that_moved_too_far() -> None:
    for moved in (-500.0, 500.0):
        tokens = TokenOutputs(numbers(moved, 0.0), torch.zeros(2), numbers(0, 0), units(0, 0))
        found = Vespo().compute(ratio_of(tokens), numbers(1, -1), tokens)
        assert found.isfinite().all() and found.abs().max() < 1e-9 * abs(moved)


def test_ipo_keeps_the_ratio_of_near_tokens_and_pulls_all_back(tokens: TokenOutputs) -> None:
    moved = (tokens.logprobs - tokens.old_logprobs).detach()
    change = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()
    expected = torch.where(change.abs() <= 0.1, -ADVANTAGE * moved.exp(), 0.0) + 0.5 * 2 * moved
    alone = TokenOutputs(tokens.logprobs, tokens.entropy, tokens.old_logprobs)
    loss = Ipo(threshold=0.1, drift_coef=0.5)
    found = loss.compute(ratio_of(alone), ADVANTAGE, alone)
    assert close(gradient(found, alone), expected)
    assert loss.clipped_mask(ratio_of(alone), ADVANTAGE, alone).tolist() == (change.abs() > 0.1).tolist()
    assert 0 < int((change.abs() > 0.1).sum()) < 6  # control
    half = TokenOutputs(numbers(0.0), torch.zeros(1), numbers(0.5).log())  # exactly at the threshold
    assert Ipo(threshold=0.5).clipped_mask(ratio_of(half), numbers(1), half).tolist() == [False]


@pytest.mark.parametrize("loss", [Vespo(), Ipo()], ids=["vespo", "ipo"])
def test_on_policy_the_gradient_is_the_policy_gradient(loss: PolicyLoss) -> None:
    logprobs = torch.linspace(-3, -0.1, 6, dtype=torch.float64).requires_grad_()
    tokens = TokenOutputs(logprobs, torch.zeros(6), logprobs.detach(), None if "token" in loss.levels else UNIT)
    assert close(gradient(loss.compute(ratio_of(tokens), ADVANTAGE, tokens), tokens), -ADVANTAGE)


def test_luspo_is_gspo_with_each_trajectory_weighted_by_its_length(tokens: TokenOutputs) -> None:
    luspo = ALGORITHMS["luspo"]
    moved = tokens.logprobs.detach() - tokens.old_logprobs
    sequence_ratio = [float(moved[unit == UNIT].mean().exp()) for unit in range(3)]
    clipped = [min(max(ratio, 1 - 2e-3), 1 + 2.5e-3) for ratio in sequence_ratio]
    advantage = [float(ADVANTAGE[unit == UNIT][0]) for unit in range(3)]
    losses = [-min(r * a, c * a) for r, c, a in zip(sequence_ratio, clipped, advantage, strict=True)]
    lengths = [3, 1, 2]
    expected = sum(loss * length for loss, length in zip(losses, lengths, strict=True)) / 3
    weights = TokenWeights(ADVANTAGE, torch.full((6,), 1 / 3, dtype=torch.float64), torch.ones(6))
    assert luspo.compute_loss(tokens, weights)[0].item() == pytest.approx(expected)


@pytest.mark.parametrize("delta", [1.5, 4.0])
def test_the_dual_clip_is_the_two_sided_clip(delta: float) -> None:
    # INTELLECT-2 (2505.07291, section 4.1), delta in TRL: min(min(r, delta) A, clip(r) A)
    ratio = torch.linspace(0.01, 8, 200, dtype=torch.float64)
    tokens = TokenOutputs(ratio.log(), torch.zeros(200), torch.zeros(200))
    for sign in (1.0, -1.0):
        advantage = torch.full_like(ratio, sign)
        two_sided = -torch.minimum(ratio.clamp(max=delta) * advantage, ratio.clamp(0.8, 1.3) * advantage)
        assert close(Clip(clip_high=0.3, dual_clip=delta).compute(ratio, advantage, tokens), two_sided)
