"""Estimators with a critic: GAE over tokens, over turns, over both."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import Advantage, asked
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.ops.group_stats import whiten
from agent_r1.algorithms.ops.returns import generalized_advantages
from agent_r1.algorithms.signals import Estimate, ModelOutputs, ValueTargets
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import previous_within, segment_count, segment_last


class WithCritic(Advantage):
    """What estimators with a critic have in common."""

    needs: ClassVar[frozenset[Need]] = frozenset({"critic"})

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token, or per turn where credit is over turns."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda: 1 trusts returns, 0 trusts the critic."""

    value_clip: float = Field(default=0.5, gt=0)
    """How far a value may move from its old one before its pull ends."""

    warmup: int = Field(default=0, ge=0)
    """First updates in which the critic learns alone."""

    bootstrap: bool = False
    """Where an episode was cut, credit goes on with the critic's value. Else the limit is part of the task, and its
    end an end."""

    def cut_values(self, batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
        """(M,) the value of the state each trajectory stops in: 0 where it ended."""
        if not self.bootstrap:
            return torch.zeros_like(batch.outcomes)
        ends = asked(signals.ends, "a critic's values")[batch.last_turns]
        return torch.where(batch.truncated, ends, 0.0)

    def end_targets(self, batch: TrainingBatch, following: Tensor) -> tuple[Tensor, Tensor]:
        """Target and share (S,) of the states that actions lead to, given the return from each turn on (S,).

        Such a state is worth what the next turn's is, and nothing where the episode ended; where it was cut nobody
        knows.
        """
        last = batch.last_turns
        target = following.roll(-1).index_fill(0, last, 0.0)
        known = torch.ones_like(target).index_put((last,), (~batch.truncated).to(target))
        return target, known / known.sum().clamp(min=1) if self.bootstrap else torch.zeros_like(target)


class TokenGae(WithCritic):
    """GAE with action tokens as steps; what the world said between them does not count as time. PPO."""

    kind = "token_gae"
    over_time: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"GAE over tokens (gamma {self.gamma:g}, lambda {self.lam:g}), whitened over the tokens of the batch"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        values = asked(signals.values, "a critic's values")
        advantage = self.over_tokens(batch, signals, self.lam)
        return Estimate(whiten(advantage), self.token_targets(batch, advantage + values))

    def over_tokens(self, batch: TrainingBatch, signals: ModelOutputs, lam: float | Tensor) -> Tensor:
        """(N,) GAE with each trajectory's tokens as a chain in order of time."""
        values = asked(signals.values, "a critic's values")
        last = segment_last(batch.token_trajectory)
        after = torch.zeros_like(values).index_put((last,), self.cut_values(batch, signals))
        return generalized_advantages(batch.token_rewards, values, after, batch.token_before, self.gamma, lam)

    def token_targets(self, batch: TrainingBatch, targets: Tensor) -> ValueTargets:
        """The critic learns at every token that the policy chose."""
        shares = batch.chosen / batch.chosen.sum()
        return ValueTargets(targets, shares.to(targets), *self.end_targets(batch, targets[batch.first_tokens]))


class LengthAdaptiveGae(TokenGae):
    """GAE whose lambda grows with the trajectory, and 1 for the critic's targets: VAPO (2504.05118, section 4.2)."""

    kind = "length_adaptive_gae"

    alpha: float = Field(default=0.05, gt=0)
    """lambda = 1 - 1 / (alpha * tokens of the trajectory)."""

    @property
    def formula(self) -> str:
        return (
            f"GAE over tokens (gamma {self.gamma:g}, lambda 1 - 1 / ({self.alpha:g} tokens); lambda {self.lam:g} for "
            "the critic), whitened over the tokens of the batch"
        )

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        values = asked(signals.values, "a critic's values")
        lengths = segment_count(batch.token_trajectory)[batch.token_trajectory]
        lam = (1 - 1 / (self.alpha * lengths)).clamp(min=0)
        targets = self.over_tokens(batch, signals, self.lam) + values
        return Estimate(whiten(self.over_tokens(batch, signals, lam)), self.token_targets(batch, targets))


class TurnGae(WithCritic):
    """GAE with turns as steps: V of a turn is that of the state before its first token. StepPO (2604.18401)."""

    kind = "turn_gae"

    @property
    def formula(self) -> str:
        return f"GAE over turns (gamma {self.gamma:g}, lambda {self.lam:g}), whitened over the turns of the batch"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        advantage, values = turn_advantages(self, batch, signals, self.gamma)
        first = batch.first_tokens
        targets = torch.zeros(len(batch.ids), dtype=values.dtype).index_put((first,), advantage + values)
        shares = torch.zeros_like(targets).index_fill(0, first, 1 / len(first))
        ends = self.end_targets(batch, advantage + values)
        return Estimate(whiten(advantage)[batch.token_turn], ValueTargets(targets, shares, *ends))


class BiLevelGae(TokenGae):
    """GAE over turns, whose result each turn's last token earns in a GAE over the tokens of that turn (VAGEN, RAGEN).

    Turns are where they were lived, also those without a reward.
    """

    kind = "bi_level_gae"

    turn_gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn; gamma is that per token."""

    @property
    def formula(self) -> str:
        return (
            f"GAE over the tokens of a turn (gamma {self.gamma:g}, lambda {self.lam:g}) whose last one earns V + A of "
            f"the turn by GAE over turns (gamma {self.turn_gamma:g}, lambda {self.lam:g}), whitened over tokens"
        )

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        values = asked(signals.values, "a critic's values")
        turns, turn_values = turn_advantages(self, batch, signals, self.turn_gamma)
        last = segment_last(batch.token_turn)
        rewards = torch.zeros_like(values).index_put((last,), turns + turn_values)
        nothing = torch.zeros_like(values)
        within = previous_within(batch.token_turn)
        advantage = generalized_advantages(rewards, values, nothing, within, self.gamma, self.lam)
        return Estimate(whiten(advantage), self.token_targets(batch, advantage + values))


def turn_advantages(part: WithCritic, batch: TrainingBatch, signals: ModelOutputs, gamma: float) -> tuple[Tensor, Tensor]:
    """GAE (S,) over each trajectory's turns, and their values (S,)."""
    values = asked(signals.values, "a critic's values")[batch.first_tokens]
    after = torch.zeros_like(values).index_put((batch.last_turns,), part.cut_values(batch, signals))
    advantage = generalized_advantages(batch.turn_rewards, values, after, batch.turn_before, gamma, part.lam)
    return advantage, values
