"""Estimates of a divergence KL(pi || q) from the log-probabilities of tokens drawn from pi.

The three of joschu.net/blog/kl-approx.html, and two whose gradient is right as well. What a loss pulls towards is
decided by the gradient: that of ``k1`` is 0 in expectation, that of ``k3`` belongs to KL(q || pi).
"""

from __future__ import annotations

from torch import Tensor

from agent_r1.algorithms.ops.ratio import log_ratio


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """log(pi/q): unbiased; its own gradient is 0 in expectation."""
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """log(pi/q)^2 / 2: biased, but its gradient is that of KL(pi||q) in expectation."""
    return (logprobs - other).square() / 2


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """q/pi - 1 - log(q/pi): unbiased and never negative; its gradient is that of KL(q||pi)."""
    difference = log_ratio(other, logprobs)
    return difference.exp() - 1 - difference


def kl_k3_plus(logprobs: Tensor, other: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: unbiased, never negative, and pulls as KL(pi||q) does."""
    straight = kl_k2(logprobs, other)
    return kl_k3(logprobs, other).detach() + straight - straight.detach()


def kl_k3_unbiased(logprobs: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    """(pi / pi_old) * k3, gradient through both: that of KL(pi||q) for tokens drawn from pi_old (DeepSeek-V3.2)."""
    return ratio * kl_k3(logprobs, other)
