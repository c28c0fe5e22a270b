"""Policy losses: the loss of each token.

In the formulas, pi is the probability of the token, A its advantage, r its importance ratio pi / pi_old at the ratio
level, and ``sg`` the stop-gradient. The loss of GSPO is PPO clipping with the ``ratio_level`` "trajectory".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import clamp_log_ratio
from agent_r1.algorithms.types import Component, Level, TokenOutputs
from agent_r1.data.batch import segment_mean, segment_sum

ALL_LEVELS: Set[Level] = {"token", "turn", "trajectory"}
TOKEN_LEVEL: Set[Level] = {"token"}


class PolicyLoss(Component, ABC):
    """Base class of policy losses. Training minimizes the weighted sum of the losses of all tokens."""

    name: str = ""

    levels: ClassVar[Set[Level]] = ALL_LEVELS
    """The values of ``ratio_level`` for which the loss is defined."""
    uses_ratio: ClassVar[bool] = True
    """Whether the loss depends on the importance ratio. If not, it is correct only for one pass over on-policy
    samples."""
    regularizes: ClassVar[bool] = False
    """Whether a token with advantage 0 has a gradient, for example from a penalty on its ratio."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The maximized term as text, such as "A log pi". Settings are written as their values."""

    @abstractmethod
    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return the loss of each token: (n,).

        ``ratio`` (n,) is the importance ratio at the algorithm's ratio level, with gradient. ``advantage`` (n,) has no
        gradient. Most losses do not need ``tokens``.
        """

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return for each token whether it is clipped or masked: (n,) bool, for the metric ``clip_fraction``."""
        return torch.zeros_like(advantage, dtype=torch.bool)


class Clip(PolicyLoss):
    """The clipped loss of PPO (arXiv:1707.06347, equation 7): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    A larger ``clip_high`` than ``clip_low`` is the "clip-higher" of DAPO (arXiv:2503.14476). ``dual_clip`` is from
    dual-clip PPO (arXiv:1912.09729).
    """

    name: Literal["clip"] = "clip"

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """A token with a negative advantage has no gradient if its importance ratio is below 1 - clip_low."""

    clip_high: float = Field(default=0.2, ge=0)
    """A token with a positive advantage has no gradient if its importance ratio is above 1 + clip_high."""

    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound of the loss if the advantage A is negative: at most -A times this number. none: no bound."""

    @property
    def formula(self) -> str:
        bound = "" if self.dual_clip is None else f", at least {self.dual_clip:g} A if A < 0"
        return f"min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A){bound}"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        # -min(x, y) = max(-x, -y)
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - self.clip_low, 1 + self.clip_high))
        if self.dual_clip is None:
            return loss
        # without dual_clip, the loss of a token with A < 0 and a large r has no bound
        return torch.where(advantage < 0, torch.minimum(loss, -advantage * self.dual_clip), loss)

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        return self.compute(ratio, advantage, tokens) != -advantage * ratio  # clipped if the loss is not -r A


class PolicyGradient(PolicyLoss):
    """The loss of REINFORCE (Williams 1992): -A log pi."""

    name: Literal["policy_gradient"] = "policy_gradient"
    levels: ClassVar[Set[Level]] = TOKEN_LEVEL
    uses_ratio: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        return "A log pi"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        return -advantage * tokens.logprobs


class ImportanceSampling(PolicyLoss):
    """The importance-weighted policy gradient -sg(min(r, max_ratio)) A log pi: AIPO of LlamaRL (arXiv:2505.24034)."""

    name: Literal["importance_sampling"] = "importance_sampling"

    max_ratio: float | None = Field(default=None, gt=0)
    """An importance ratio above this number is replaced by this number. none: no bound."""

    @property
    def formula(self) -> str:
        return f"sg({'r' if self.max_ratio is None else f'min(r, {self.max_ratio:g})'}) A log pi"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        weight = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        return -weight.detach() * advantage * tokens.logprobs


class Cispo(PolicyLoss):
    """The loss of CISPO (arXiv:2506.13585, equation 4): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi.

    A token with a clipped ratio still has a gradient.
    """

    name: Literal["cispo"] = "cispo"

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """An importance ratio below 1 - clip_low is replaced by 1 - clip_low."""

    clip_high: float = Field(default=4.0, ge=0)
    """An importance ratio above 1 + clip_high is replaced by 1 + clip_high."""

    @property
    def formula(self) -> str:
        return f"sg(clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g})) A log pi"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)  # (n,)
        return -weight.detach() * advantage * tokens.logprobs

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        return (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)


class Topr(PolicyLoss):
    """The loss of TOPR, tapered off-policy REINFORCE (arXiv:2503.14286).

    -A log pi if A > 0, else -sg(min(r, 1)) A log pi.
    """

    name: Literal["topr"] = "topr"

    @property
    def formula(self) -> str:
        return "A log pi if A > 0, else sg(min(r, 1)) A log pi"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        weight = torch.where(advantage > 0, 1.0, ratio.clamp(max=1.0))  # (n,)
        return -weight.detach() * advantage * tokens.logprobs


class Sapo(PolicyLoss):
    """The loss of SAPO, with a smooth function instead of a clip (arXiv:2511.20347).

    -(4 / tau) sigmoid(tau (r - 1)) A, with tau = ``tau_positive`` if A > 0, else ``tau_negative``.
    """

    name: Literal["sapo"] = "sapo"

    tau_positive: float = Field(default=1.0, gt=0)
    """tau for tokens with a positive advantage. With a larger tau, the gradient decreases faster if the importance
    ratio moves away from 1."""

    tau_negative: float = Field(default=1.05, gt=0)
    """tau for tokens with a negative advantage. With a larger tau, the gradient decreases faster if the importance
    ratio moves away from 1."""

    @property
    def formula(self) -> str:
        return f"(4 / t) sigmoid(t (r - 1)) A; t = {self.tau_positive:g} if A > 0, else {self.tau_negative:g}"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        tau = torch.full_like(advantage, self.tau_negative).masked_fill(advantage > 0, self.tau_positive)  # (n,)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


class Dppo(PolicyLoss):
    """The loss of DPPO, Binary-TV (arXiv:2602.04879): -sg(min(r, max_ratio)) A log pi, or 0 for a masked token.

    A token is masked if A > 0 and pi - pi_old > clip_high, or if A <= 0 and pi_old - pi > clip_low.
    """

    name: Literal["dppo"] = "dppo"
    levels: ClassVar[Set[Level]] = TOKEN_LEVEL

    clip_low: float = Field(default=0.2, gt=0)
    """A token with advantage 0 or less is masked if its probability decreased by more than this number."""

    clip_high: float = Field(default=0.2, gt=0)
    """A token with a positive advantage is masked if its probability increased by more than this number."""

    max_ratio: float = Field(default=20.0, gt=0)
    """An importance ratio above this number is replaced by this number."""

    @property
    def formula(self) -> str:
        return (
            f"sg(min(r, {self.max_ratio:g})) A log pi; dropped if A > 0 and pi - pi_old > {self.clip_high:g}, or if "
            f"A <= 0 and pi_old - pi > {self.clip_low:g}"
        )

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        weight = ratio.clamp(max=self.max_ratio) * ~self.clipped_mask(ratio, advantage, tokens)
        return -weight.detach() * advantage * tokens.logprobs

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        increase = tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()  # (n,) pi - pi_old
        return torch.where(advantage > 0, increase > self.clip_high, increase < -self.clip_low)


class Gmpo(PolicyLoss):
    """The loss of GMPO (arXiv:2507.20673, equation 4).

    -A times the geometric mean of the clipped importance ratios in the token's turn or trajectory. Each log-ratio is
    clipped to at most ``clip_log_ratio`` if A > 0, else to at least -``clip_log_ratio``. A clipped token has no
    gradient.
    """

    name: Literal["gmpo"] = "gmpo"
    levels: ClassVar[Set[Level]] = {"turn", "trajectory"}

    clip_log_ratio: float = Field(default=0.4, gt=0)
    """Bound of the log of a token's importance ratio. With a positive advantage, the log is clipped to at most this
    number. With any other advantage, the log is clipped to at least minus this number."""

    @property
    def formula(self) -> str:
        return f"A exp(mean of log r, each clipped at +-{self.clip_log_ratio:g} on the side that A favors)"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        if tokens.ratio_unit is None:
            raise TypeError("gmpo needs the turn or trajectory of each token")
        bound = self.clip_log_ratio
        log_ratio = clamp_log_ratio(tokens.logprobs - tokens.old_logprobs)  # (n,) of each token
        clipped = torch.where(advantage > 0, log_ratio.clamp(max=bound), log_ratio.clamp(min=-bound))
        # (n,) the geometric mean over the unit of each token
        mean = segment_mean(clipped.detach(), tokens.ratio_unit)[tokens.ratio_unit].exp()
        # The value is -A * mean. The factor 1 + x - sg(x) is 1 and has the gradient of x. So the average over a unit
        # has the gradient of -A exp(mean of x).
        return -advantage * mean * (1 + clipped - clipped.detach())

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        log_ratio = clamp_log_ratio(tokens.logprobs - tokens.old_logprobs)
        return torch.sign(advantage) * log_ratio > self.clip_log_ratio


class Vespo(PolicyLoss):
    """The loss of VESPO (arXiv:2602.10693, section 3.4; ``vespo`` in TRL): -sg(phi(W)) A log pi.

    W is the product of the importance ratios of the token's turn or trajectory, and phi(W) = W^k exp(lambda (1 - W)),
    so phi(1) = 1. k and lambda depend on the sign of A.
    """

    name: Literal["vespo"] = "vespo"
    levels: ClassVar[Set[Level]] = {"turn", "trajectory"}

    power_positive: float = Field(default=2.0, ge=0)
    """Exponent k in the loss weight W^k exp(lambda (1 - W)) of a token with an advantage of 0 or more. W is the product
    of the importance ratios in its turn or trajectory. A larger k decreases the loss weight if W < 1."""

    decay_positive: float = Field(default=3.0, gt=0)
    """Number lambda in the loss weight W^k exp(lambda (1 - W)) of a token with an advantage of 0 or more. W is the
    product of the importance ratios in its turn or trajectory. A larger lambda decreases the loss weight if W > 1."""

    power_negative: float = Field(default=3.0, ge=0)
    """As power_positive, for a token with a negative advantage."""

    decay_negative: float = Field(default=2.0, gt=0)
    """As decay_positive, for a token with a negative advantage."""

    @property
    def formula(self) -> str:
        return (
            f"sg(W^k exp(l (1 - W))) A log pi, W = product of r; k = {self.power_positive:g}, "
            f"l = {self.decay_positive:g} if A >= 0, else k = {self.power_negative:g}, l = {self.decay_negative:g}"
        )

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        if tokens.ratio_unit is None:
            raise TypeError("vespo needs the turn or trajectory of each token")
        log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()  # (n,) of each token
        log_weight = clamp_log_ratio(segment_sum(log_ratio, tokens.ratio_unit))[tokens.ratio_unit]  # (n,) log W
        rises = advantage >= 0
        power = torch.full_like(advantage, self.power_negative).masked_fill(rises, self.power_positive)  # (n,) k
        decay = torch.full_like(advantage, self.decay_negative).masked_fill(rises, self.decay_positive)  # (n,) lambda
        phi = (power * log_weight + decay * (1 - log_weight.exp())).exp()  # (n,)
        return -phi * advantage * tokens.logprobs


class Ipo(PolicyLoss):
    """The loss of IPO (``ipo_loss_fn`` of prime-rl): -r A + drift_coef (log r)^2.

    If |pi - pi_old| > ``threshold``, the term -r A is left out.
    """

    name: Literal["ipo"] = "ipo"
    levels: ClassVar[Set[Level]] = TOKEN_LEVEL
    regularizes: ClassVar[bool] = True

    threshold: float = Field(default=0.1, gt=0)
    """If the probability of a token changes by more than this number during the update, the term -r A (r: importance
    ratio, A: advantage) is left out of the token's loss. The penalty (see ``drift_coef``) remains."""

    drift_coef: float = Field(default=0.001, ge=0)
    """Weight of the penalty (log r)^2 in the loss of a token, with the importance ratio r of the token."""

    @property
    def formula(self) -> str:
        return f"r A, dropped if |pi - pi_old| > {self.threshold:g}, less {self.drift_coef:g} (log r)^2"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        kept = ~self.clipped_mask(ratio, advantage, tokens)  # (n,)
        return -(kept * advantage * ratio) + self.drift_coef * ratio.log().square()

    def clipped_mask(self, ratio: Tensor, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        return (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs() > self.threshold
