"""Importance ratios between two policies, from log-probabilities of tokens."""

from __future__ import annotations

from torch import Tensor

from agent_r1.data.segments import segment_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this range before they are exponentiated, so that every ratio is finite."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to a range in which its exponential is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, unit: Tensor | None = None) -> Tensor:
    """Return the importance ratio r = pi / pi_old of each token: (n,) -> (n,), with gradient through ``logprobs``.

    With ``unit`` (n,), r is the sequence-level importance ratio of GSPO (2507.18071, equation 7): the geometric mean
    over the tokens of the same turn or trajectory, (pi(y) / pi_old(y))^(1 / |y|).

    Its gradient is the token's own (GSPO-token, equation 14): r = sg(mean) * pi / sg(pi). Summed over a unit with one
    advantage and weights 1 / |y|, it equals the gradient of the sequence-level ratio. So no gradient has to flow
    through other tokens of the unit.
    """
    if unit is None:
        return clamp_log_ratio(logprobs - old_logprobs).exp()
    mean = clamp_log_ratio(segment_mean((logprobs - old_logprobs).detach(), unit))  # (units,) log of the geometric mean
    return (mean[unit] + logprobs - logprobs.detach()).exp()
