"""Where sampler and trainer disagree: factors on the loss, from log(pi_old / mu) per token. Nothing here has gradient.

``log_ratios`` (N,) are per token or already those of its unit; pi_old is the trainer's policy before the update, mu
the one that sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.algorithms.ops.ratio import LARGEST_LOG_RATIO
from agent_r1.data.segments import segment_mean, segment_sum


def product_log_ratio(log_ratios: Tensor, unit: Tensor) -> Tensor:
    """The log-ratio of each token's whole unit, the sum over it: (N,) -> (N,)."""
    return segment_sum(log_ratios, unit)[unit]


def mean_log_ratio(log_ratios: Tensor, unit: Tensor) -> Tensor:
    """The mean log-ratio of each token's unit, the logarithm of the geometric mean: (N,) -> (N,)."""
    return segment_mean(log_ratios, unit)[unit]


def truncated(log_ratios: Tensor, high: float) -> Tensor:
    """min(r, high): truncated importance sampling."""
    return _ratio(log_ratios).clamp(max=high)


def windowed(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """r inside [low, high], 0 outside: IcePop."""
    return torch.where(within(log_ratios, low, high), _ratio(log_ratios), 0.0)


def within(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """Whether r is inside [low, high]: what a rejection rule keeps."""
    ratio = _ratio(log_ratios)
    return (ratio >= low) & (ratio <= high)


def _ratio(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
