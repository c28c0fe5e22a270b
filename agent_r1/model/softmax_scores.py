"""Log-probabilities and entropies from logits, computed in parts that fit into a processor's cache.

The logits are the largest tensor of an update. So everything that needs a row of logits is computed while the row is in
the cache. Only one tensor of the size positions x vocabulary stays in memory. The tensor holds first the logits, then
the log-probabilities, and at the end the gradient of the logits.

Shapes: N positions, H hidden size, m target tokens at a position, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

PART_LOGITS = 1 << 18
"""Number of logits that are processed together, so that they fit into a processor's cache: 1 MiB in fp32."""


class SoftmaxScores(NamedTuple):
    """Log-probabilities (N, m) of m target tokens at each of N positions, and entropies (N,) in nats."""

    logprobs: Tensor
    entropy: Tensor


def softmax_scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
) -> SoftmaxScores:
    """Return the log-probabilities (N, m) of m target tokens at each of N positions, and the entropies (N,).

    ``hidden`` (N, H) holds the hidden states, and ``targets`` (N, m) holds the target tokens. ``head`` computes the
    logits (N, V). Log-probabilities are log-softmax(logits / temperature), in fp32 or a more precise type. Entropies
    have a gradient only if ``entropy_gradient`` is true.

    This function overwrites the logits. So the backward pass of ``head`` must not read the logits, and the backward
    pass of this function can run only once.
    """
    scores = cast(Any, _Scores).apply(head(hidden), targets, temperature, entropy_gradient)
    return SoftmaxScores(*scores)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> Any:
        table = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))  # (N, V), without a copy in fp32
        logprobs, entropy = table.new_empty(targets.shape), table.new_empty(len(targets))
        for rows in _parts(table):
            part = (table[rows] / temperature).log_softmax(-1)
            torch.gather(part, -1, targets[rows], out=logprobs[rows])
            table[rows] = part
            finite = part.clamp(min=torch.finfo(part.dtype).min)  # p log p of an excluded token: 0, not 0 * -inf
            entropy[rows] = -(part.exp() * finite).sum(-1)
        ctx.save_for_backward(table, targets, entropy)
        ctx.temperature, ctx.dtype, ctx.entropy_gradient = temperature, logits.dtype, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor) -> Any:
        """Return the gradient of the logits.

        With the logits z, the probabilities p, a target token a, the entropy H and the temperature T:
            d log p_a / d z_i = (1[i = a] - p_i) / T
            d H / d z_i = -p_i (log p_i + H) / T
        """
        table, targets, entropy = ctx.saved_tensors
        for rows in _parts(table):
            logs = table[rows]
            upstream = torch.zeros_like(logs).scatter_add_(1, targets[rows], logprobs_grad[rows])
            gradient = torch._log_softmax_backward_data(upstream, logs, -1, logs.dtype)
            if ctx.entropy_gradient:
                finite = logs.clamp(min=torch.finfo(logs.dtype).min)
                gradient -= entropy_grad[rows, None] * logs.exp() * (finite + entropy[rows, None])
            table[rows] = gradient / ctx.temperature
        return table.to(ctx.dtype), None, None, None


def _parts(table: Tensor) -> list[slice]:
    """Return slices of the rows of ``table``, each of which fits into a processor's cache.

    On a GPU, all rows are one part. Fake tensors only measure memory, and all parts need the same memory, so for a fake
    table only the first part is returned.
    """
    count = max(1, PART_LOGITS // table.shape[1]) if table.device.type == "cpu" else max(1, len(table))
    parts = [slice(first, first + count) for first in range(0, len(table), count)]
    return parts[:1] if isinstance(table, FakeTensor) else parts
