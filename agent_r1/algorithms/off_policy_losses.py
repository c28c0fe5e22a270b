"""Policy losses for off-policy samples: VESPO and IPO. All other policy losses are in ``policy_losses.py``."""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Level
from agent_r1.algorithms.ops import clamp_log_ratio
from agent_r1.algorithms.policy_losses import TOKEN_LEVEL, PolicyLoss
from agent_r1.algorithms.types import TokenOutputs
from agent_r1.data.segments import segment_sum


class Vespo(PolicyLoss):
    """The loss of VESPO (arXiv:2602.10693, section 3.4; ``vespo`` in TRL).

    With the probability pi of a token, its advantage A, the product W of the importance ratios of the token's turn or
    trajectory, and the stop-gradient sg, the loss is -sg(phi(W)) A log pi. Here phi(W) = W^k exp(lambda (1 - W)), so
    phi(1) = 1. k and lambda depend on the sign of A.
    """

    name: Literal["vespo"] = "vespo"
    levels: ClassVar[Set[Level]] = {"turn", "trajectory"}

    power_positive: float = Field(default=2.0, ge=0)
    """Exponent k in the loss weight of a token with an advantage of 0 or more. Let W be the product of the importance
    ratios in the token's turn or trajectory, and lambda the setting decay_positive. The loss weight is
    W^k exp(lambda (1 - W)). If W < 1, a larger k decreases the loss weight."""

    decay_positive: float = Field(default=3.0, gt=0)
    """Number lambda in the loss weight of a token with an advantage of 0 or more. Let W be the product of the
    importance ratios in the token's turn or trajectory, and k the setting power_positive. The loss weight is
    W^k exp(lambda (1 - W)). If W > 1, a larger lambda decreases the loss weight."""

    power_negative: float = Field(default=3.0, ge=0)
    """Exponent k in the loss weight of a token with a negative advantage. Let W be the product of the importance ratios
    in the token's turn or trajectory, and lambda the setting decay_negative. The loss weight is
    W^k exp(lambda (1 - W)). If W < 1, a larger k decreases the loss weight."""

    decay_negative: float = Field(default=2.0, gt=0)
    """Number lambda in the loss weight of a token with a negative advantage. Let W be the product of the importance
    ratios in the token's turn or trajectory, and k the setting power_negative. The loss weight is
    W^k exp(lambda (1 - W)). If W > 1, a larger lambda decreases the loss weight."""

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
    """The loss of IPO (``ipo_loss_fn`` of prime-rl).

    r = pi / pi_old is the importance ratio of a token, and A is the advantage of the token. The loss of the token is
    -r A + drift_coef (log r)^2. If |pi - pi_old| > ``threshold``, the term -r A is left out.
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
