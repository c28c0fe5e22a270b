"""The measures of ``agent-r1 smoke``: changes of weights and log-probabilities, and differences of gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agent_r1.core.inference import Canary
from agent_r1.trainer.updater import UpdateReport


def with_noise(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return ``weights`` plus normal noise.

    The standard deviation of the noise is ``scale`` times the tensor's standard deviation, or ``scale * 0.02`` for a
    constant tensor.
    """
    generator = torch.Generator().manual_seed(0)
    changed = {}
    for name, weight in weights.items():
        if weight.is_floating_point():
            spread = float(weight.float().std(correction=0)) or 0.02
            noise = torch.randn(weight.shape, generator=generator) * (scale * spread)
            weight = weight + noise.to(weight.dtype)
        changed[name] = weight
    return changed


def mean_change(before: Canary, after: Canary) -> float:
    """Return the mean absolute difference of the log-probabilities of fixed prompts (the canary), in nats."""
    moves = [
        abs(old - new)
        for then, now in zip(before, after, strict=True)
        for old, new in zip(then.logprobs, now.logprobs, strict=True)
    ]
    return sum(moves) / len(moves)


def first_moments(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first moments of AdamW in ``tensors``, the state of a trainer."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith(".exp_avg")}


def largest_gap(found: UpdateReport, expected: UpdateReport, ending: str) -> float:
    """Return the largest difference of two updates in the metrics whose names end with ``ending``."""
    pairs = [(found.metrics[name], value) for name, value in expected.metrics.items() if name.endswith(ending)]
    return max((abs(own - other) / max(abs(other), 1.0) for own, other in pairs), default=0.0)


def relative_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return |found - expected| / |expected| for all tensors together; infinity if the names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    squares = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    norms = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return (squares / norms) ** 0.5 if norms else float(squares > 0)
