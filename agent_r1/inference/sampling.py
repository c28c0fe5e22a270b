"""Sample tokens from logits. Shapes: N rows, V vocabulary size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_r1.core.inference import SamplingParams, TopLogprobs


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of fp32 logits (N, V). Return (tokens, log-probabilities), both (N,).

    Log-probabilities are log-softmax(logits / temperature) over the full vocabulary, including the tokens that top-p or
    top-k exclude. At temperature 0, the most probable token is chosen, with its log-probability at temperature 1.
    ``uniform`` holds a random number in [0, 1) for each row, which selects the token.
    """
    temperature = torch.tensor([row.temperature or 1.0 for row in params], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)  # (N, V)
    probabilities = logprobs.double().exp()  # (N, V), 0 for tokens that top-k or top-p exclude
    for index, row in enumerate(params):
        if row.top_k or row.top_p < 1:
            probabilities[index] *= _allowed(probabilities[index], row)
    # The first token at which the cumulative probability exceeds uniform * total; total < 1 if tokens are excluded.
    cumulative = probabilities.cumsum(dim=-1)  # (N, V)
    target = torch.tensor(uniform, dtype=torch.float64, device=logits.device) * cumulative[:, -1]  # (N,)
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)  # (N,)
    greedy = torch.tensor([row.temperature == 0 for row in params], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def likeliest(logits: Tensor, temperature: float, count: int) -> TopLogprobs:
    """Return the ``count`` most likely tokens of a row of fp32 logits (V,), with their log-probabilities.

    The log-probabilities are log-softmax(logits / temperature), at temperature 1 if ``temperature`` is 0.
    """
    top = torch.log_softmax(logits / (temperature or 1.0), dim=-1).topk(min(count, len(logits)))
    return tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _allowed(probabilities: Tensor, row: SamplingParams) -> Tensor:
    """Return a bool mask (V,) of the tokens that ``row.top_k`` and ``row.top_p`` allow.

    The most probable token is always allowed.
    """
    order = probabilities.argsort(descending=True, stable=True)
    ranked = probabilities[order]
    keep = ranked.cumsum(0) - ranked < row.top_p  # more probable tokens have a total probability below top_p
    if row.top_k:
        keep[row.top_k :] = False
    return torch.zeros_like(keep).scatter(0, order, keep)
