"""Importance ratios between two policies, computed from the log-probabilities of tokens."""

from __future__ import annotations

from torch import Tensor

from agent_r1.data.segments import segment_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO] before exp is applied, so that every ratio is finite."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return ``log_ratio``, clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_share(weight: Tensor) -> float:
    """Return the effective sample size of n tokens with importance weights w, as a share of n: (n,) -> [0, 1].

    The effective sample size is (sum w)^2 / sum w^2 (Kish, 1965). The share is 1 if all weights are equal. It is k / n
    if k tokens have equal weights and the other tokens have weight 0. If all weights are 0, the share is 0.
    """
    squares = float(weight.square().sum())
    return float(weight.sum()) ** 2 / (len(weight) * squares) if squares else 0.0


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, unit: Tensor | None = None) -> Tensor:
    """Return the importance ratio r = pi / pi_old of each token: (n,), with gradient through ``logprobs``.

    ``logprobs`` (n,) are log pi, and ``old_logprobs`` (n,) are log pi_old.

    If ``unit`` (n,) is given, all tokens of a unit (a turn or a trajectory) have the same value of r. This value is the
    geometric mean s = (pi(y) / pi_old(y))^(1 / |y|) over the tokens y of the unit, as in GSPO (2507.18071, equation 7).
    The gradient of r at a token flows only through the probability of this token: r = sg(s) * pi / sg(pi), with the
    stop-gradient sg (GSPO-token, equation 14).
    """
    if unit is None:
        return clamp_log_ratio(logprobs - old_logprobs).exp()
    mean = clamp_log_ratio(segment_mean((logprobs - old_logprobs).detach(), unit))  # (units,) log of the geometric mean
    return (mean[unit] + logprobs - logprobs.detach()).exp()
