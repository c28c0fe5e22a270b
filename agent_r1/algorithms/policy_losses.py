"""Policy losses: how a token pulls, by its advantage and how far the policy has moved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Level, Component
from agent_r1.algorithms.ops.ratio import (
    clipped_surrogate,
    dual_clip,
    geometric_surrogate,
    log_ratio,
    soft_gate,
    weighted_logprob,
)

EVERY_LEVEL: Set[Level] = {"token", "turn", "trajectory"}
ONE_TOKEN: Set[Level] = {"token"}


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """n tokens, and how far the policy has moved from the old one at them.

    ``logprobs`` and ``log_ratios`` (n,) carry gradient; a token's log-ratio is its unit's. ``unit`` (n,) numbers the
    units from 0.
    """

    logprobs: Tensor
    old: Tensor
    log_ratios: Tensor
    unit: Tensor

    @property
    def ratios(self) -> Tensor:
        return self.log_ratios.exp()


class PolicyLoss(Component, ABC):
    """A policy loss per token, to be minimised. ``levels``: of what its ratio can be."""

    levels: ClassVar[Set[Level]] = EVERY_LEVEL
    uses_ratio: ClassVar[bool] = True

    @property
    @abstractmethod
    def formula(self) -> str:
        """What is maximised, in terms of A, r and pi, with its numbers."""

    @abstractmethod
    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        """(n,) loss of each token; ``advantage`` (n,) is without gradient."""

    def bounded(self, moved: Moved, advantage: Tensor) -> Tensor:
        """(n,) which tokens the policy has moved too far at, so that they no longer pull as they would."""
        return torch.zeros_like(advantage, dtype=torch.bool)


class Clip(PolicyLoss):
    """PPO's clipped surrogate (1707.06347, equation 7), its upper bound free (DAPO, 2503.14476), with dual clip."""

    kind = "clip"

    low: float = Field(default=0.2, ge=0, lt=1)
    """How far below 1 a ratio pulls."""

    high: float = Field(default=0.2, ge=0)
    """How far above 1 a ratio pulls."""

    dual: float | None = Field(default=3.0, gt=1)
    """The least a token counts is this times its negative advantage (1912.09729); none: no such bound."""

    @property
    def formula(self) -> str:
        bound = "" if self.dual is None else f", at least {self.dual:g} A where A < 0"
        return f"min(r A, clip(r, {1 - self.low:g}, {1 + self.high:g}) A){bound}"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        loss = clipped_surrogate(moved.ratios, advantage, self.low, self.high)
        return loss if self.dual is None else dual_clip(loss, advantage, self.dual)

    def bounded(self, moved: Moved, advantage: Tensor) -> Tensor:
        return self.loss(moved, advantage) != -advantage * moved.ratios


class PolicyGradient(PolicyLoss):
    """-A log pi: REINFORCE (Williams 1992). Right only for samples of the present policy."""

    kind = "policy_gradient"
    levels: ClassVar[Set[Level]] = ONE_TOKEN
    uses_ratio: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        return "A log pi"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        return weighted_logprob(torch.ones_like(advantage), advantage, moved.logprobs)


class ImportanceSampling(PolicyLoss):
    """-sg(min(r, bound)) A log pi: AIPO (LlamaRL, 2505.24034); plain importance sampling where there is no bound."""

    kind = "importance_sampling"

    bound: float | None = Field(default=None, gt=0)
    """The most a ratio counts."""

    @property
    def formula(self) -> str:
        return f"sg({'r' if self.bound is None else f'min(r, {self.bound:g})'}) A log pi"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        ratios = moved.ratios if self.bound is None else moved.ratios.clamp(max=self.bound)
        return weighted_logprob(ratios, advantage, moved.logprobs)


class Cispo(PolicyLoss):
    """-sg(clip(r)) A log pi: CISPO (2506.13585). Clipped tokens go on pulling."""

    kind = "cispo"

    low: float = Field(default=1.0, ge=0, le=1)
    """How far below 1 a ratio counts."""

    high: float = Field(default=4.0, ge=0)
    """How far above 1 a ratio counts."""

    @property
    def formula(self) -> str:
        return f"sg(clip(r, {1 - self.low:g}, {1 + self.high:g})) A log pi"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        return weighted_logprob(moved.ratios.clamp(1 - self.low, 1 + self.high), advantage, moved.logprobs)

    def bounded(self, moved: Moved, advantage: Tensor) -> Tensor:
        return (moved.ratios < 1 - self.low) | (moved.ratios > 1 + self.high)


class Topr(PolicyLoss):
    """-A log pi where A > 0, else -sg(min(r, 1)) A log pi: tapered off-policy REINFORCE (2503.14286)."""

    kind = "topr"

    @property
    def formula(self) -> str:
        return "A log pi where A > 0, else sg(min(r, 1)) A log pi"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        weight = torch.where(advantage > 0, 1.0, moved.ratios.clamp(max=1.0))
        return weighted_logprob(weight, advantage, moved.logprobs)


class Sapo(PolicyLoss):
    """-(4 / tau) sigmoid(tau (r - 1)) A: SAPO (2511.20347), a soft gate in place of a clip."""

    kind = "sapo"

    tau_positive: float = Field(default=1.0, gt=0)
    """How fast the pull fades where A > 0."""

    tau_negative: float = Field(default=1.05, gt=0)
    """How fast the pull fades where A <= 0."""

    @property
    def formula(self) -> str:
        return f"(4 / t) sigmoid(t (r - 1)) A; t = {self.tau_positive:g} where A > 0, else {self.tau_negative:g}"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        temperature = torch.full_like(advantage, self.tau_negative).masked_fill(advantage > 0, self.tau_positive)
        return soft_gate(moved.ratios, advantage, temperature)


class Dppo(PolicyLoss):
    """-sg(min(r, bound)) A log pi where the probability has not moved too far outward: DPPO, Binary-TV (2602.04879)."""

    kind = "dppo"
    levels: ClassVar[Set[Level]] = ONE_TOKEN

    low: float = Field(default=0.2, gt=0)
    """How far a probability may have fallen where A <= 0."""

    high: float = Field(default=0.2, gt=0)
    """How far a probability may have risen where A > 0."""

    bound: float = Field(default=20.0, gt=0)
    """The most a ratio counts."""

    @property
    def formula(self) -> str:
        return (
            f"sg(min(r, {self.bound:g})) A log pi; dropped where A > 0 and pi - pi_old > {self.high:g}, or A <= 0 and "
            f"pi_old - pi > {self.low:g}"
        )

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        kept = ~self.bounded(moved, advantage)
        return weighted_logprob(moved.ratios.clamp(max=self.bound) * kept, advantage, moved.logprobs)

    def bounded(self, moved: Moved, advantage: Tensor) -> Tensor:
        risen = moved.logprobs.detach().exp() - moved.old.exp()
        return torch.where(advantage > 0, risen > self.high, risen < -self.low)


class Gmpo(PolicyLoss):
    """-A times the geometric mean of a unit's clipped ratios: GMPO (2507.20673)."""

    kind = "gmpo"
    levels: ClassVar[Set[Level]] = {"turn", "trajectory"}

    clip: float = Field(default=0.4, gt=0)
    """How far a token's log-ratio counts, on the side its advantage pulls to."""

    @property
    def formula(self) -> str:
        return f"A exp(mean of log r, each clipped at +-{self.clip:g} on the side that A pulls to)"

    def loss(self, moved: Moved, advantage: Tensor) -> Tensor:
        tokens = log_ratio(moved.logprobs, moved.old)
        return geometric_surrogate(tokens, advantage, moved.unit, self.clip)

    def bounded(self, moved: Moved, advantage: Tensor) -> Tensor:
        outward = torch.sign(advantage) * log_ratio(moved.logprobs, moved.old)
        return outward > self.clip
