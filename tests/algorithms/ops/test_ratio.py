"""Ratios of probabilities and the losses made of them, by hand, and the policy gradient where nothing has moved."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import close, numbers, units

from agent_r1.algorithms.ops.ratio import (
    clipped_surrogate,
    clipped_value_loss,
    dual_clip,
    geometric_surrogate,
    log_ratio,
    soft_gate,
    unit_log_ratio,
    weighted_logprob,
)


def test_clipping_by_hand() -> None:
    ratio, advantage = numbers(1.5, 1.5, 0.5, 0.5, 1.0), numbers(1, -1, 1, -1, 2)
    found = clipped_surrogate(ratio, advantage, 0.2, 0.3)
    assert close(found, numbers(-1.3, 1.5, -0.5, 0.8, -2.0))


def test_dual_clip_acts_only_where_the_advantage_is_negative_and_the_ratio_large() -> None:
    ratio, advantage = numbers(5.0, 5.0, 2.0), numbers(-1, 1, -1)
    loss = clipped_surrogate(ratio, advantage, 0.2, 0.2)
    assert loss.tolist() == [5.0, -1.2, 2.0]
    assert dual_clip(loss, advantage, 3.0).tolist() == [3.0, -1.2, 2.0]


def test_a_ratio_that_ran_away_stays_finite() -> None:
    assert log_ratio(numbers(1e6, -1e6), numbers(0, 0)).exp().isfinite().all()
    assert unit_log_ratio(numbers(1e6, 1e6), numbers(0, 0), units(0, 0)).exp().isfinite().all()
    assert not numbers(1e6).exp().isfinite().all()  # control


def test_the_log_ratio_of_a_unit_is_its_mean_and_moves_with_each_token_alone() -> None:
    logprobs = numbers(0.4, 0.8, -1.0).requires_grad_()
    found = unit_log_ratio(logprobs, numbers(0, 0, 0), units(0, 0, 1))
    assert close(found, numbers(0.6, 0.6, -1.0))
    (gradient,) = torch.autograd.grad(found[0], logprobs)
    assert gradient.tolist() == [1, 0, 0]


def test_the_soft_gate_by_hand() -> None:
    # at r = 1 the sigmoid is 1/2: -(4 / tau) / 2 A; at r = 2 and tau 1 it is 1 / (1 + 1/e)
    found = soft_gate(numbers(1, 2), numbers(3, -1), numbers(2, 1))
    assert close(found, numbers(-3, 4 / (1 + math.exp(-1))))


def test_the_geometric_surrogate_by_hand_and_with_the_gradient_of_its_unit() -> None:
    moved = numbers(0.6, -0.2, 0.1, -0.5).requires_grad_()
    advantage, unit = numbers(1, 1, -2, -2), units(0, 0, 1, 1)
    loss = geometric_surrogate(moved, advantage, unit, 0.4)
    # first unit: 0.6 counts 0.4, mean 0.1; second: -0.5 counts -0.4, mean -0.15
    assert close(loss, numbers(-math.exp(0.1), -math.exp(0.1), 2 * math.exp(-0.15), 2 * math.exp(-0.15)))
    (gradient,) = torch.autograd.grad(loss.sum() / 2, moved)
    of_units = -math.exp((0.4 - 0.2) / 2) / 2, 2 * math.exp((0.1 - 0.4) / 2) / 2  # d/dx of A exp((x + y) / 2)
    assert close(gradient, numbers(0, of_units[0], of_units[1], 0))


def test_a_weight_is_not_differentiated() -> None:
    logprobs = numbers(-1, -2).requires_grad_()
    loss = weighted_logprob(logprobs.exp(), numbers(3, -1), logprobs)
    assert close(loss, numbers(3 * math.exp(-1), -2 * math.exp(-2)))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert close(gradient, numbers(-3 * math.exp(-1), math.exp(-2)))


@pytest.mark.parametrize("surrogate", ["clip", "unit clip", "soft", "geometric", "weighted"])
def test_where_nothing_has_moved_every_loss_has_the_policy_gradient(surrogate: str) -> None:
    logprobs = torch.randn(7, dtype=torch.float64).requires_grad_()
    old, unit = logprobs.detach(), units(0, 0, 0, 1, 1, 2, 2)
    advantage = torch.randn(3, dtype=torch.float64)[unit]
    ratio = log_ratio(logprobs, old).exp()
    loss = {
        "clip": lambda: clipped_surrogate(ratio, advantage, 0.2, 0.2),
        "unit clip": lambda: clipped_surrogate(unit_log_ratio(logprobs, old, unit).exp(), advantage, 0.2, 0.2),
        "soft": lambda: soft_gate(ratio, advantage, torch.full_like(advantage, 1.05)),
        "geometric": lambda: geometric_surrogate(log_ratio(logprobs, old), advantage, unit, 0.4),
        "weighted": lambda: weighted_logprob(ratio, advantage, logprobs),
    }[surrogate]()
    (found,) = torch.autograd.grad(loss.sum(), logprobs)
    assert close(found, -advantage)


def test_value_loss_by_hand() -> None:
    values, old, target = numbers(1.0, 1.0, 0.3), numbers(0.0, 0.0, 0.2), numbers(1.0, -1.0, 0.0)
    # clipped to 0.5: 0.5 against 1, and against -1 the unclipped one is worse; within the clip both are equal
    assert close(clipped_value_loss(values, old, target, 0.5), numbers(0.5 * 0.25, 0.5 * 4, 0.5 * 0.09))
