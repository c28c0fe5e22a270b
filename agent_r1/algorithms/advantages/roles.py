"""The advantage estimator for games with several agents."""

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
    """The advantage A = R - b(role): role-conditioned advantage estimation (RAE) of SPIRAL (arXiv:2506.24119).

    R is the return. b(role) is a running mean of the returns of earlier trajectories with this role.
    """

    name: Literal["against_role"] = "against_role"
    needs: ClassVar[frozenset[Need]] = frozenset({"role_baseline"})

    decay: float = Field(default=0.95, ge=0, lt=1)
    """Weight of the old running mean b of a role when a return R is added: b becomes decay * b + (1 - decay) * R."""

    @property
    def formula(self) -> str:
        return f"R - running mean R of the role (decay {self.decay:g})"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return (batch.returns - batch.role_baseline)[batch.token_trajectory]  # (M,) -> (N,)

    def track(
        self, baselines: Mapping[str, float], roles: Sequence[str], returns: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the baseline b of each trajectory (float64, (M,)), and the new running mean of each role.

        The returns are added to the running means one after the other. b is the running mean of the trajectory's role
        just before the return of the trajectory is added; 0 if the role has no earlier returns. So trajectories of one
        batch with the same role can have different b.

        Args:
            baselines: The old running mean of each role: the mean before the batch.
            roles: The role of each trajectory.
            returns: (M,) the return of each trajectory.
        """
        present, seen = dict(baselines), list[float]()
        for role, earned in zip(roles, returns.tolist(), strict=True):
            baseline = present.get(role, 0.0)
            seen.append(baseline)
            present[role] = self.decay * baseline + (1 - self.decay) * earned
        return torch.tensor(seen, dtype=torch.float64), present
