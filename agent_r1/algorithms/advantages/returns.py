"""Estimators from returns alone, without group or critic."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from agent_r1.algorithms.advantages.advantage import Advantage, asked, on_tokens
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.ops.group_stats import whiten
from agent_r1.algorithms.ops.returns import discounted_sums
from agent_r1.algorithms.signals import Estimate, ModelOutputs
from agent_r1.data.batch import TrainingBatch


class TokenReturns(Advantage):
    """The discounted return from each token on, whitened over the batch: REINFORCE++ (2501.03262)."""

    kind = "token_returns"
    over_time: ClassVar[bool] = True

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per token), whitened over the tokens of the batch"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return Estimate(whiten(discounted_sums(batch.token_rewards, batch.token_before, self.gamma)))


class TurnReturns(Advantage):
    """The discounted return from each turn on, whitened over turns: Agent-R1's REINFORCE."""

    kind = "turn_returns"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per turn), whitened over the turns of the batch"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        to_go = discounted_sums(batch.turn_rewards, batch.turn_before, self.gamma)
        return Estimate(whiten(to_go)[batch.token_turn])


class Success(Advantage):
    """1 where a trajectory earned enough, else 0: rejection-sampling fine-tuning, with the policy's own samples."""

    kind = "success"

    threshold: float = 1.0
    """What is enough."""

    @property
    def formula(self) -> str:
        return f"1 where R >= {self.threshold:g}, else 0"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return on_tokens((batch.returns >= self.threshold).double(), batch)


class Teacher(Advantage):
    """How much likelier the teacher finds each token than the policy that chose it: on-policy distillation.

    -(log mu - log teacher), the negative of k1 towards the teacher, which must not be differentiated itself.
    """

    kind = "teacher"
    needs: ClassVar[frozenset[Need]] = frozenset({"teacher"})
    of_sums: ClassVar[bool] = False

    @property
    def formula(self) -> str:
        return "log pi_teacher - log pi_sampler of the token"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return Estimate(asked(signals.teacher, "a teacher's log-probabilities") - batch.sampler_logprobs)
