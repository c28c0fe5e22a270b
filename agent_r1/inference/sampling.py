"""Sample tokens from logits. Each row has its own temperature, filters and random number.

Shapes: N rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_r1.core.inference import TopLogprobs


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The parameters for sampling one token from one row of logits.

    ``temperature`` 0 selects the most probable token. ``top_p`` 1 and ``top_k`` 0 exclude no token. ``uniform`` is a
    random number in [0, 1) that selects the token.
    """

    temperature: float
    top_p: float
    top_k: int
    uniform: float


def sample_tokens(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of fp32 logits (N, V). Return (tokens, log-probabilities), both (N,).

    Log-probabilities are log-softmax(logits / temperature) over the full vocabulary, even if top-p or top-k exclude
    tokens. In a row with temperature 0, the most probable token is chosen, and its log-probability is computed at
    temperature 1.
    """
    temperature = torch.tensor([row.temperature or 1.0 for row in rows], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)  # (N, V)
    tokens = _invert_cdf(_filter(logprobs, rows), rows)
    greedy = torch.tensor([row.temperature == 0 for row in rows], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def likeliest(logits: Tensor, temperature: float, count: int) -> TopLogprobs:
    """Return the ``count`` most likely tokens of a row of fp32 logits (V,), with their log-probabilities.

    The log-probabilities are log-softmax(logits / temperature), at temperature 1 if ``temperature`` is 0.
    """
    top = torch.log_softmax(logits / (temperature or 1.0), dim=-1).topk(min(count, len(logits)))
    return tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _filter(logprobs: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Return the probabilities (N, V) in fp64, with 0 for tokens that top-k or top-p exclude.

    A row with excluded tokens has a sum below 1.
    """
    probabilities = logprobs.double().exp()
    for index, row in enumerate(rows):
        if row.top_k or row.top_p < 1:
            probabilities[index] *= _allowed(probabilities[index], row)
    return probabilities


def _allowed(probabilities: Tensor, row: RowSampling) -> Tensor:
    """Return whether top-k and top-p allow each token of a row: (V,) bool.

    The most probable token is always allowed.
    """
    order = probabilities.argsort(descending=True, stable=True)
    ranked = probabilities[order]
    keep = ranked.cumsum(0) - ranked < row.top_p  # more probable tokens have a total probability below top_p
    if row.top_k:
        keep[row.top_k :] = False
    return torch.zeros_like(keep).scatter(0, order, keep)


def _invert_cdf(probabilities: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Return the sampled token of each row: (N,).

    This is the first token at which the cumulative probability exceeds ``uniform`` * total. The total is the sum of the
    probabilities of the row. It is below 1 if tokens are excluded.
    """
    cumulative = probabilities.cumsum(dim=-1)
    uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=probabilities.device)
    target = uniform * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=probabilities.shape[1] - 1)
