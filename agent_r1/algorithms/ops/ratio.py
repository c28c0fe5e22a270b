"""Ratios of probabilities, and the losses that are made of them, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.data.segments import segment_mean

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated."""


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, clamped so that its exponential stays finite."""
    return (logprobs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def unit_log_ratio(logprobs: Tensor, old: Tensor, unit: Tensor) -> Tensor:
    """The mean log-ratio of each token's unit, whose gradient is the token's own (GSPO-token, 2507.18071).

    Summed over a unit with equal advantage and weights of one over its length, it has the gradient of the unit's
    ratio. So no unit's gradient has to flow through another token.
    """
    mean = segment_mean((logprobs - old).detach(), unit).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return mean[unit] + logprobs - logprobs.detach()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A): PPO's loss per token (1707.06347, equation 7)."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def dual_clip(loss: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """At most -bound * A where A < 0, however far the ratio ran away (1912.09729)."""
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * bound), loss)


def weighted_logprob(weight: Tensor, advantage: Tensor, logprobs: Tensor) -> Tensor:
    """-sg(weight) A log pi: the policy gradient (Williams 1992), each token's scaled by a weight without gradient."""
    return -weight.detach() * advantage * logprobs


def soft_gate(ratio: Tensor, advantage: Tensor, temperature: Tensor) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: SAPO's loss (2511.20347), whose pull fades as r leaves 1."""
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantage


def geometric_surrogate(log_ratios: Tensor, advantage: Tensor, unit: Tensor, clip: float) -> Tensor:
    """-A exp(mean of the unit's clipped log-ratios), as each token's part of it: GMPO (2507.20673).

    A log-ratio is clipped on the side to which its advantage pulls, before the mean is taken; a clipped token has
    no gradient. Averaged over the unit this is the unit's loss, and has its gradient.
    """
    bounded = torch.where(advantage > 0, log_ratios.clamp(max=clip), log_ratios.clamp(min=-clip))
    mean = segment_mean(bounded.detach(), unit)[unit].exp()
    return -advantage * mean * (1 + bounded - bounded.detach())


def clipped_value_loss(values: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """0.5 * max((V - G)^2, (V_clipped - G)^2), V_clipped within ``clip`` of the old value."""
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - target).square(), (near - target).square())
