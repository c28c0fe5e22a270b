"""Components of a user's own, in a module that ranks have to import."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from agent_r1.algorithms.policy_losses import PolicyLoss


class Halved(PolicyLoss):
    """Half of the plain policy gradient loss with a ratio."""

    name: Literal["halved"] = "halved"
    formula = "-r A / 2"

    def compute(self, ratio: Tensor, advantage: Tensor, tokens: Any) -> Tensor:
        return -ratio * advantage / 2
