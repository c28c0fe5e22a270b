"""Advantage estimators that need neither a group nor a critic.

R is the return of a trajectory, and r_k the reward of token or turn k. ``whiten`` scales to mean 0 and standard
deviation 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import discounted_sums, reaches, whiten
from agent_r1.algorithms.types import Advantage, ModelOutputs, Need, require
from agent_r1.data.batch import TrainingBatch


class TokenReturns(Advantage):
    """The advantage A_t = whiten(sum_{k >= t} gamma^(k - t) r_k) of token t: REINFORCE++ (arXiv:2501.03262)."""

    name: Literal["token_returns"] = "token_returns"
    over_time: ClassVar[bool] = True

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per token), whitened over the tokens of the batch"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return whiten(discounted_sums(batch.token_rewards, batch.token_trajectory, self.gamma))  # (N,)


class TurnReturns(Advantage):
    """The advantage A_t = whiten(sum_{k >= t} gamma^(k - t) r_k) of turn t, as in Agent-R1 (arXiv:2511.14460).

    This is REINFORCE (Williams 1992) over turns.
    """

    name: Literal["turn_returns"] = "turn_returns"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per turn), whitened over the turns of the batch"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        returns_to_go = discounted_sums(batch.turn_rewards, batch.turn_trajectory, self.gamma)  # (S,)
        return whiten(returns_to_go)[batch.token_turn]  # (S,) -> (N,)


class Success(Advantage):
    """The advantage A = 1 if R >= threshold, else 0: rejection-sampling fine-tuning (arXiv:2308.01825)."""

    name: Literal["success"] = "success"

    threshold: float = 1.0
    """Smallest return of a successful trajectory."""

    @property
    def formula(self) -> str:
        return f"1 if R >= {self.threshold:g}, else 0"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return reaches(batch.returns, self.threshold).double()[batch.token_trajectory]  # (M,) -> (N,)


class Teacher(Advantage):
    """The advantage A = log pi_teacher - log pi_old of each token: on-policy distillation (arXiv:2306.13649).

    -A is the estimate k1 of KL(pi_old || pi_teacher), with the policy pi_old before the update.
    """

    name: Literal["teacher"] = "teacher"
    needs: ClassVar[frozenset[Need]] = frozenset({"teacher"})
    uses_returns: ClassVar[bool] = False
    uses_policy: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "log pi_teacher - log pi_old of the token"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        # old_logprobs is None if the update makes one pass over fresh samples: pi_old is then the sampler's policy
        policy = batch.sampler_logprobs if outputs.old_logprobs is None else outputs.old_logprobs  # (N,)
        return require(outputs.teacher_logprobs, "a teacher's log-probabilities") - policy


class Zero(Advantage):
    """The advantage A = 0. Only other terms of the loss, such as ``distillation``, train the policy."""

    name: Literal["zero"] = "zero"
    uses_returns: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        return "0"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return torch.zeros(len(batch.ids), dtype=torch.float64)


class AgainstRole(Advantage):
    """The advantage A = R - b(role): role-conditioned advantage estimation (RAE) of SPIRAL (arXiv:2506.24119).

    b(role) is a running mean of the returns of earlier trajectories with this role.
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
        """Return the baseline b of each trajectory (M,), and the new running mean of each role.

        The ``returns`` (M,) are added to the running means one after the other. b is the mean of the trajectory's role
        just before; 0 if the role has no earlier returns.
        """
        present, seen = dict(baselines), list[float]()
        for role, earned in zip(roles, returns.tolist(), strict=True):
            baseline = present.get(role, 0.0)
            seen.append(baseline)
            present[role] = self.decay * baseline + (1 - self.decay) * earned
        return torch.tensor(seen, dtype=torch.float64), present
