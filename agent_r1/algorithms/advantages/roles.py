"""The role-conditioned advantage estimator for games of several agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch


class AgainstRole(Advantage):
    """A = R - b(role), b the running mean of the role's returns: RAE of SPIRAL (2506.24119).

    In a zero-sum game the mean over both players says nothing, and a player with a structural advantage, such as the
    first move, would get permanent credit. Each role is compared with its own past instead.
    """

    name: Literal["against_role"] = "against_role"
    needs: ClassVar[frozenset[Need]] = frozenset({"role_baseline"})

    decay: float = Field(default=0.95, ge=0, lt=1)
    """Share of the running mean that remains when a return is added: b <- decay b + (1 - decay) R."""

    @property
    def formula(self) -> str:
        return f"R - running mean R of the role (decay {self.decay:g})"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return (batch.returns - batch.role_baseline)[batch.token_trajectory]  # (M,) -> (N,)

    def track(
        self, baselines: Mapping[str, float], roles: Sequence[str], returns: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the baseline of each trajectory, (M,) float64, and the baselines of the roles after all of them.

        Each trajectory sees the baseline before its own return is added, so the baseline does not depend on it.
        Baselines begin at 0.
        """
        present, seen = dict(baselines), list[float]()
        for role, earned in zip(roles, returns.tolist(), strict=True):
            baseline = present.get(role, 0.0)
            seen.append(baseline)
            present[role] = self.decay * baseline + (1 - self.decay) * earned
        return torch.tensor(seen, dtype=torch.float64), present
