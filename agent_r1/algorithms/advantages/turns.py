"""Estimators that tell the turns of a trajectory apart without a critic."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.ops.group_stats import center, over_deviation, standardize
from agent_r1.algorithms.ops.returns import discounted_sums
from agent_r1.algorithms.signals import Estimate, ModelOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import places_within, renumbered, segment_count, segment_sum


class BetweenTurns(Advantage):
    """What estimators that compare turns of a group have in common."""

    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation."""


class ProcessRelative(BetweenTurns):
    """Turn rewards standardised over all turns of the group, summed from each turn on.

    Process supervision in GRPO (2402.03300, section 4.1.3). The outcome is a reward of the last turn.
    """

    kind = "process_relative"

    @property
    def formula(self) -> str:
        return f"sum from the turn on of (r - mean r of the group's turns) / (std r + {self.epsilon:g})"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        standard = standardize(batch.turn_rewards, batch.turn_group, self.epsilon)
        return Estimate(discounted_sums(standard, batch.turn_before, 1.0)[batch.token_turn])


class TurnAndOutcome(BetweenTurns):
    """The outcome's advantage everywhere, and that of the process rewards where a tool was used: MT-GRPO (2505.11821).

    A trajectory that used no tool gets the advantage of everything it earned.
    """

    kind = "turn_and_outcome"

    coefficient: float = Field(default=1.0, ge=0)
    """Weight of the process rewards' advantage."""

    @property
    def formula(self) -> str:
        process = f"{self.coefficient:g} A(process rewards) in turns with results of tools"
        return f"A(outcome) + {process}; A standardised in the group"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        group = batch.trajectory_group
        process = segment_sum(batch.process_rewards, batch.turn_trajectory)
        outcome = standardize(batch.outcomes, group, self.epsilon)[batch.turn_trajectory]
        used = self.coefficient * standardize(process, group, self.epsilon)[batch.turn_trajectory]
        combined = standardize(batch.returns, group, self.epsilon)[batch.turn_trajectory]
        any_tool = segment_sum(batch.turn_results.double(), batch.turn_trajectory)[batch.turn_trajectory] > 0
        turns = torch.where(any_tool, outcome + torch.where(batch.turn_results, used, 0.0), combined)
        return Estimate(turns[batch.token_turn])


class SameTurn(BetweenTurns):
    """The return from a turn on, standardised over the group's turns of the same number: GTPO (2511.14846)."""

    kind = "same_turn"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per turn), standardised over the group's turns of the same number"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        to_go = discounted_sums(batch.turn_rewards, batch.turn_before, self.gamma)
        same = renumbered(batch.turn_group, places_within(batch.turn_trajectory))
        return Estimate(standardize(to_go, same, self.epsilon)[batch.token_turn])


class SameState(BetweenTurns):
    """The trajectory's advantage plus that of the return from a turn on among turns in the same state: GiGPO.

    (2505.10978.) The state is what the world had just said, word for word.
    """

    kind = "same_state"

    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of the advantage among equal states."""

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""

    standard: bool = False
    """Whether differences are divided by the standard deviation."""

    @property
    def formula(self) -> str:
        scale = " / std" if self.standard else ""
        return (
            f"(R - mean R of the group){scale} + {self.turn_weight:g} (G - mean G of the group's turns in the same "
            f"state){scale}; G = return to go (gamma {self.gamma:g} per turn)"
        )

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        episode = self.relative(batch.returns, batch.trajectory_group)[batch.turn_trajectory]
        to_go = discounted_sums(batch.turn_rewards, batch.turn_before, self.gamma)
        turns = episode + self.turn_weight * self.relative(to_go, batch.turn_states)
        return Estimate(turns[batch.token_turn])

    def relative(self, x: Tensor, key: Tensor) -> Tensor:
        advantage = center(x, key)
        return over_deviation(advantage, x, key, self.epsilon) if self.standard else advantage


class SameHistory(BetweenTurns):
    """The return from a turn on among the group's turns in the same state with the same k states before it, mixed
    over k: HGPO (2602.22817).

    Longer histories compare like with like but have fewer turns; those with one turn have no say. Before the first
    turn there is nothing, which is a history too.
    """

    kind = "same_history"

    history: int = Field(default=2, ge=0)
    """The longest history compared, in states before the present one: K."""

    alpha: float = Field(default=1.0, ge=0)
    """History k weighs (k + 1)^alpha."""

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return (
            f"mean over k = 0..{self.history}, weighted by (k + 1)^{self.alpha:g}, of (G - mean G) / "
            f"(std G + {self.epsilon:g}) among the group's turns in the same state after the same k states; "
            f"G = return to go (gamma {self.gamma:g} per turn)"
        )

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        to_go = discounted_sums(batch.turn_rewards, batch.turn_before, self.gamma)
        total, weights = torch.zeros_like(to_go), torch.zeros_like(to_go)
        key, earlier = batch.turn_states, batch.turn_states
        before = batch.turn_before
        for k in range(self.history + 1):
            weight = float((k + 1) ** self.alpha) * (segment_count(key)[key] > 1).to(to_go)
            total += weight * standardize(to_go, key, self.epsilon)
            weights += weight
            earlier, key = _one_earlier(earlier, key, before)
        return Estimate((total / weights.clamp(min=1))[batch.token_turn])


def _one_earlier(states: Tensor, key: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The states one turn before each of ``states`` (-1: none), and histories ``key`` told apart by those too."""
    earlier = torch.where(before >= 0, states[before.clamp(min=0)], -1)
    return earlier, renumbered(key, earlier)
