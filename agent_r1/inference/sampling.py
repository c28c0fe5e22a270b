"""Draw tokens from logits, each row with its own temperature, filters and random number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row draws: ``uniform`` in [0, 1) decides the token, so a row's draw needs no shared generator."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float


def draw_tokens(logits: Tensor, draws: list[Draw]) -> tuple[Tensor, Tensor]:
    """Tokens (N,) and their log-probabilities (N,) from fp32 logits (N, V).

    The log-probability is that of log-softmax(logits / temperature) over the full vocabulary, whatever
    top-p and top-k left to draw from; greedy rows (temperature 0) report temperature 1.
    """
    temperature = torch.tensor([draw.temperature or 1.0 for draw in draws], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    tokens = _inverse_cdf(_filtered(logprobs, draws), draws)
    greedy = torch.tensor([draw.temperature == 0 for draw in draws], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _filtered(logprobs: Tensor, draws: list[Draw]) -> Tensor:
    """Probabilities (N, V) left after top-k and top-p; rows without filters are untouched."""
    probabilities = logprobs.double().exp()
    for row, draw in enumerate(draws):
        if draw.top_k or draw.top_p < 1:
            probabilities[row] *= _kept(probabilities[row], draw)
    return probabilities


def _kept(probabilities: Tensor, draw: Draw) -> Tensor:
    """Which of the tokens (V,) may be drawn. The most probable one always may."""
    order = probabilities.argsort(descending=True, stable=True)
    ranked = probabilities[order]
    keep = ranked.cumsum(0) - ranked < draw.top_p
    if draw.top_k:
        keep[draw.top_k :] = False
    return torch.zeros_like(keep).scatter(0, order, keep)


def _inverse_cdf(probabilities: Tensor, draws: list[Draw]) -> Tensor:
    cumulative = probabilities.cumsum(dim=-1)
    uniform = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=probabilities.device)
    target = uniform * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=probabilities.shape[1] - 1)
