"""KL estimators: KL(pi || q) from the log-probabilities of tokens sampled from pi.

k1, k2 and k3 are named as in joschu.net/blog/kl-approx.html. The minimum of a KL loss depends on the gradient of the
estimator, not on its value: the gradient of k1 is 0 in expectation, and k3 has the gradient of KL(q || pi).
"""

from __future__ import annotations

from torch import Tensor

from agent_r1.algorithms.ops.importance_sampling import clamp_log_ratio


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return log(pi / q): unbiased; its gradient is 0 in expectation."""
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return log(pi / q)^2 / 2: biased, but its gradient is in expectation the gradient of KL(pi || q)."""
    return (logprobs - other).square() / 2


def kl_k3(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return q / pi - 1 - log(q / pi): unbiased and never negative; its gradient is the gradient of KL(q || pi).

    With ``bound`` it is at most that, and has no gradient beyond.
    """
    difference = clamp_log_ratio(other - logprobs)  # log(q / pi)
    k3 = difference.exp() - 1 - difference
    return k3 if bound is None else k3.clamp(max=bound)


def kl_k3_plus(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return the value of k3 with the gradient of k2: unbiased, never negative, with the gradient of KL(pi || q)."""
    k2 = kl_k2(logprobs, other)
    # sg(k3) has the value, k2 - sg(k2) is 0 and has the gradient
    return kl_k3(logprobs, other, bound).detach() + k2 - k2.detach()


def kl_k3_unbiased(logprobs: Tensor, other: Tensor, ratio: Tensor, bound: float | None = None) -> Tensor:
    """Return (pi / pi_old) * k3, with gradient through both factors (DeepSeek-V3.2, 2512.02556).

    Value and gradient equal KL(pi || q) and its gradient for tokens sampled from pi_old.
    """
    return ratio * kl_k3(logprobs, other, bound)
