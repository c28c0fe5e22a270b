"""The clipped policy loss that GRPO, RLOO, REINFORCE++ and PPO share, and its terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from agent_r1.learn.algebra import clipped_surrogate, dual_clip, kl_k3, log_ratio, token_mean, unit_mean
from agent_r1.learn.row import Credit, Metrics, Terms, TokenView

Aggregation = Literal["token_mean", "trajectory_mean"]

AGGREGATIONS: Mapping[Aggregation, Callable[[Tensor], Tensor]] = {
    "token_mean": token_mean,
    "trajectory_mean": unit_mean,
}
"""From the trajectory of each token to its weight in the loss."""


class ClippedTerms(Terms):
    """How far a ratio may move before its token stops pulling. ``dual_clip`` None switches that bound off."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=3.0, gt=1)
    aggregation: Aggregation = "token_mean"

    def weight(self, token_trajectory: Tensor) -> Tensor:
        """(N,) -> (N,): each token's share of the loss."""
        return AGGREGATIONS[self.aggregation](token_trajectory)

    def objective(self, advantage: str) -> str:
        """The objective in one line, given how the advantage is made."""
        bound = "" if self.dual_clip is None else f", at least {self.dual_clip:g} A where A < 0"
        surrogate = f"min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){bound}"
        return f"maximise the {self.aggregation.replace('_', ' ')} of {surrogate}; r = pi / pi_old; A = {advantage}"


def clipped_loss(view: TokenView, credit: Credit, terms: ClippedTerms) -> tuple[Tensor, Metrics]:
    """The weighted sum over tokens of PPO's clipped loss, with dual clip."""
    ratio = log_ratio(view.logprobs, view.old).exp()
    free = -credit.advantage * ratio
    loss = clipped_surrogate(ratio, credit.advantage, terms.clip_low, terms.clip_high)
    if terms.dual_clip is not None:
        loss = dual_clip(loss, credit.advantage, terms.dual_clip)
    total = (credit.weight * loss).sum()
    metrics = {
        "loss": total.detach(),
        "clip_fraction": (credit.weight * (loss != free)).sum().detach(),
        "kl_old": (credit.weight * kl_k3(view.old, view.logprobs)).sum().detach(),
    }
    return total, metrics
