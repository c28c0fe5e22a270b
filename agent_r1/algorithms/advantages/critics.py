"""Advantage estimators with a critic: generalized advantage estimation (GAE) over tokens, over turns, or over both."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import generalized_advantages, whiten
from agent_r1.algorithms.types import Advantage, ModelOutputs, Need, StateValues, ValueTargets
from agent_r1.data.batch import TrainingBatch, segment_count, segment_last


class WithCritic(Advantage):
    """Base class of estimators with a critic, a model that predicts the value V of each state."""

    needs: ClassVar[frozenset[Need]] = frozenset({"critic"})

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token, or per turn for estimators over turns."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda of GAE. 1: the advantage is the sampled return minus the critic's value. 0: the advantage is the
    temporal-difference error of one time step."""

    value_clip: float = Field(default=0.5, gt=0)
    """Clip range of PPO's value loss. The clipped value of a state differs by at most this number from the critic's
    value before the update."""

    warmup: int = Field(default=0, ge=0)
    """Number of updates at the start of the run in which only the critic is trained."""

    bootstrap: bool = False
    """Whether GAE uses the critic's value for the last state of a truncated episode. If not, GAE uses 0, as if the
    episode had terminated."""

    @abstractmethod
    def value_targets(self, batch: TrainingBatch, outputs: ModelOutputs) -> ValueTargets:
        """Return the values that the critic should predict, and their weights in the value loss."""

    def values(self, outputs: ModelOutputs) -> StateValues:
        if outputs.values is None:
            raise TypeError("the algorithm needs a critic's values")
        return outputs.values

    def final_values(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the value after the last action of each trajectory: (M,)."""
        if not self.bootstrap:
            return torch.zeros_like(batch.outcome_rewards)  # (M,)
        after_last = self.values(outputs).after_action[batch.last_turns]  # (M,)
        return torch.where(batch.truncated, after_last, 0.0)  # (M,) a terminal state has the value 0

    def turn_gae(self, batch: TrainingBatch, outputs: ModelOutputs, gamma: float) -> tuple[Tensor, Tensor]:
        """Return (advantages, values before the first tokens) of the S turns by GAE over turns: (S,) each."""
        values = self.values(outputs).before_token[batch.first_tokens]  # (S,)
        final = self.final_values(batch, outputs)  # (M,)
        rewards = batch.turn_rewards  # (S,)
        return generalized_advantages(rewards, values, final, batch.turn_trajectory, gamma, self.lam), values

    def _targets(self, batch: TrainingBatch, target: Tensor, weight: Tensor, turn_returns: Tensor) -> ValueTargets:
        # ``target`` and ``weight`` (N,) are for the states before tokens. The state after the action of a turn has as
        # its target the return from the next turn on, from ``turn_returns`` (S,); 0 after the last turn. Only
        # ``bootstrap`` uses these states. After the last turn of a truncated trajectory the target is unknown: weight
        # 0.
        last = batch.last_turns  # (M,)
        after = turn_returns.roll(-1).index_fill(0, last, 0.0)  # (S,)
        known = torch.ones_like(after).index_put((last,), (~batch.truncated).to(after))  # (S,)
        after_weight = known / known.sum().clamp(min=1) if self.bootstrap else torch.zeros_like(after)
        return ValueTargets(StateValues(target, after), StateValues(weight, after_weight))


class OverTokens(WithCritic):
    """Base class of estimators in which each token of the batch is one time step."""

    over_time: ClassVar[bool] = True

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        # Only the policy's advantage is whitened. The critic's targets A + V need the advantage before whitening.
        return whiten(self.gae(batch, outputs, self.lam))  # (N,)

    def value_targets(self, batch: TrainingBatch, outputs: ModelOutputs) -> ValueTargets:
        returns = self.gae(batch, outputs, self.lam) + self.values(outputs).before_token  # (N,) A + V
        weight = (batch.action_mask / batch.action_mask.sum()).to(returns)
        return self._targets(batch, returns, weight, returns[batch.first_tokens])

    def gae(self, batch: TrainingBatch, outputs: ModelOutputs, lam: float | Tensor) -> Tensor:
        """Return the advantage of each token by GAE over tokens: (N,). ``lam`` is one number or (N,)."""
        values = self.values(outputs).before_token  # (N,)
        final = self.final_values(batch, outputs)  # (M,)
        return generalized_advantages(batch.token_rewards, values, final, batch.token_trajectory, self.gamma, lam)


class TokenGae(OverTokens):
    """GAE over tokens, as in PPO (arXiv:1707.06347, equation 11)."""

    name: Literal["token_gae"] = "token_gae"

    @property
    def formula(self) -> str:
        return f"GAE over tokens (gamma {self.gamma:g}, lambda {self.lam:g}), whitened over the tokens of the batch"


class LengthAdaptiveGae(OverTokens):
    """GAE whose lambda grows with the length of the trajectory, as in VAPO (arXiv:2504.05118, section 4.2).

    For advantages, lambda is max(0, 1 - 1 / (alpha * length)), with the length in tokens. For the critic's targets,
    lambda is ``lam``.
    """

    name: Literal["length_adaptive_gae"] = "length_adaptive_gae"

    alpha: float = Field(default=0.05, gt=0)
    """alpha in lambda = max(0, 1 - 1 / (alpha * number of tokens of the trajectory))."""

    @property
    def formula(self) -> str:
        return (
            f"GAE over tokens (gamma {self.gamma:g}, lambda 1 - 1 / ({self.alpha:g} tokens); lambda {self.lam:g} for "
            "the critic), whitened over the tokens of the batch"
        )

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        lengths = segment_count(batch.token_trajectory)[batch.token_trajectory]  # (N,)
        lam = (1 - 1 / (self.alpha * lengths)).clamp(min=0)  # (N,)
        return whiten(self.gae(batch, outputs, lam))


class TurnGae(WithCritic):
    """GAE over turns: one turn is one time step, as in StepPO (arXiv:2604.18401)."""

    name: Literal["turn_gae"] = "turn_gae"

    @property
    def formula(self) -> str:
        return f"GAE over turns (gamma {self.gamma:g}, lambda {self.lam:g}), whitened over the turns of the batch"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        advantage, _ = self.turn_gae(batch, outputs, self.gamma)  # (S,)
        return whiten(advantage)[batch.token_turn]  # (S,) -> (N,)

    def value_targets(self, batch: TrainingBatch, outputs: ModelOutputs) -> ValueTargets:
        advantage, values = self.turn_gae(batch, outputs, self.gamma)
        returns, first = advantage + values, batch.first_tokens  # (S,), (S,)
        # only the state before the first token of each turn has a target; all other states have weight 0
        target = torch.zeros(len(batch.ids), dtype=values.dtype).index_put((first,), returns)
        weight = torch.zeros_like(target).index_fill(0, first, 1 / len(first))
        return self._targets(batch, target, weight, returns)


class BiLevelGae(OverTokens):
    """GAE over turns, then GAE over the tokens of each turn (VAGEN, arXiv:2510.16907; RAGEN, arXiv:2504.20073).

    The last token of a turn gets the reward V + A, with the critic's value V before the turn and its advantage A by GAE
    over turns. All other tokens get the reward 0.
    """

    name: Literal["bi_level_gae"] = "bi_level_gae"

    turn_gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn. ``gamma`` is the discount per token."""

    @property
    def formula(self) -> str:
        return (
            f"GAE over the tokens of a turn (gamma {self.gamma:g}, lambda {self.lam:g}) whose last one earns V + A of "
            f"the turn by GAE over turns (gamma {self.turn_gamma:g}, lambda {self.lam:g}), whitened over tokens"
        )

    def gae(self, batch: TrainingBatch, outputs: ModelOutputs, lam: float | Tensor) -> Tensor:
        advantage, turn_values = self.turn_gae(batch, outputs, self.turn_gamma)  # (S,), (S,)
        values = self.values(outputs).before_token  # (N,)
        last = segment_last(batch.token_turn)  # (S,)
        rewards = torch.zeros_like(values).index_put((last,), advantage + turn_values)  # (N,)
        # each turn is a unit of the GAE over tokens, and the value after the last token of a turn is 0
        return generalized_advantages(rewards, values, torch.zeros_like(turn_values), batch.token_turn, self.gamma, lam)
