"""Estimators of KL(pi || q) from the log-probabilities of tokens that were sampled from pi.

The names k1, k2 and k3 are from joschu.net/blog/kl-approx.html. The arguments are the log-probabilities under pi
(``logprobs``) and under q (``other``), (n,). In a loss, only the gradient of an estimator matters, and not its value.
In expectation, the gradient of k1 is 0, and the gradient of k3 is the gradient of KL(q || pi).
"""

from __future__ import annotations

from torch import Tensor

from agent_r1.algorithms.ops.importance_sampling import clamp_log_ratio


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return the estimate k1 = log(pi / q) of KL(pi || q) at each token: (n,).

    ``logprobs`` (n,) are log pi, and ``other`` (n,) are log q. The estimate is unbiased. Its expected gradient is 0.
    """
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return the estimate k2 = log(pi / q)^2 / 2 of KL(pi || q) at each token: (n,).

    ``logprobs`` (n,) are log pi, and ``other`` (n,) are log q. The estimate is biased. Its expected gradient is the
    gradient of KL(pi || q).
    """
    return (logprobs - other).square() / 2


def kl_k3(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return the estimate k3 = q / pi - 1 - log(q / pi) of KL(pi || q) at each token: (n,).

    ``logprobs`` (n,) are log pi, and ``other`` (n,) are log q. The estimate is unbiased and never negative. Its
    expected gradient is the gradient of KL(q || pi). If ``bound`` is given, k3 is at most ``bound``. A value at the
    bound has no gradient.
    """
    difference = clamp_log_ratio(other - logprobs)  # log(q / pi)
    k3 = difference.exp() - 1 - difference
    return k3 if bound is None else k3.clamp(max=bound)


def kl_k3_plus(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return an estimate of KL(pi || q) at each token, with the value of k3 and the gradient of k2: (n,).

    ``logprobs`` (n,) are log pi, and ``other`` (n,) are log q. The estimate is unbiased and never negative. Its
    expected gradient is the gradient of KL(pi || q). ``bound`` limits the value, but not the gradient.
    """
    k2 = kl_k2(logprobs, other)
    # the value is sg(k3), because k2 - sg(k2) is 0; the gradient is the gradient of k2
    return kl_k3(logprobs, other, bound).detach() + k2 - k2.detach()


def kl_k3_unbiased(logprobs: Tensor, other: Tensor, ratio: Tensor, bound: float | None = None) -> Tensor:
    """Return the estimate (pi / pi_old) * k3 of KL(pi || q) at each token: (n,) (DeepSeek-V3.2, 2512.02556).

    ``logprobs`` (n,) are log pi, ``other`` (n,) are log q, and ``ratio`` (n,) is pi / pi_old. ``bound`` is the largest
    value of k3. Both factors have a gradient.

    For tokens that were sampled from pi_old, the expected value is KL(pi || q), and the expected gradient is the
    gradient of KL(pi || q).
    """
    return ratio * kl_k3(logprobs, other, bound)
