"""What an algorithm is: a row of parts and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.component import Level, Need, Component
from agent_r1.algorithms.filters import Filters
from agent_r1.algorithms.loss_terms import Correction, Kl, Masks, Rejection, RewardShaping, with_kl_penalty
from agent_r1.algorithms.ops.divergence import kl_k3
from agent_r1.algorithms.ops.loss_weights import token_mean, unit_mean, unit_sum
from agent_r1.algorithms.ops.ratio import clipped_value_loss, log_ratio, unit_log_ratio
from agent_r1.algorithms.policy_losses import Clip, Moved, PolicyLoss
from agent_r1.algorithms.signals import TokenWeights, CriticView, Estimate, Metrics, ModelOutputs, TokenOutputs, ValueTargets
from agent_r1.core.errors import InvalidInput
from agent_r1.data.assemble import Scope
from agent_r1.data.batch import TrainingBatch

Aggregation = Literal["token_mean", "turn_mean", "trajectory_mean", "group_mean", "constant"]


class Algorithm(Component):
    """An algorithm as data: what credit is, how a token pulls, what is held close, what is left out.

    Parts that do not fit together are refused by :func:`agent_r1.algorithms.validation.check`.

    Example:
        Algorithm(name="dapo", paper="2503.14476", advantage=GroupRelative(scale="deviation"), surrogate=Clip(high=0.28))
    """

    name: str
    paper: str = ""
    """Where it is from, an arXiv number."""

    differs: str = ""
    """What is otherwise there."""

    advantage: SerializeAsAny[Advantage]
    """How credit is assigned."""

    surrogate: SerializeAsAny[PolicyLoss] = Clip()
    """How a token pulls."""

    ratio: Level = "token"
    """Of what r is the ratio: of a token, or the geometric mean over a turn or a trajectory."""

    anchor: Literal["policy", "sampler"] = "policy"
    """What r compares with: the policy before the update (the sampler, where a batch has tokens of older weights), or
    always the sampler."""

    aggregation: Aggregation = "token_mean"
    """What weighs the same: tokens, turns, trajectories, groups; constant: tokens, over trajectories times ``length``.
    """

    length: float | None = Field(default=None, gt=0)
    """The constant of that aggregation, in tokens."""

    entropy: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    imitation: float = Field(default=0.0, ge=0)
    """Weight of the mean of -log pi over the tokens of trajectories that earned more than 0 (VAPO, 2504.05118,
    section 4.3)."""

    observation: float = Field(default=0.0, ge=0)
    """Weight of the mean of -log pi over what the world said, as a model of the world (ECHO)."""

    kl: Kl | None = None
    correction: Correction | None = None
    rejection: Rejection | None = None
    shaping: RewardShaping = RewardShaping()
    filters: Filters = Filters()
    masks: Masks = Masks()

    refill: int = Field(default=0, ge=0)
    """Rounds of further groups that a step may ask for where some were left out (DAPO, 2503.14476, section 3.2)."""

    epochs: int = Field(default=1, ge=1)
    """How often an update goes over its batch."""

    @property
    def needs(self) -> frozenset[Need]:
        """What a run must bring."""
        return self.advantage.needs if self.kl is None else self.advantage.needs | {"reference"}

    @property
    def scope(self) -> Scope:
        """Which tokens a batch has to hold."""
        return "actions" if self.masks == Masks() and not self.observation else "episodes"

    @property
    def compares(self) -> bool:
        """Whether sampler and trainer are compared before credit is assigned."""
        return self.correction is not None or self.rejection is not None

    @property
    def warmup(self) -> int:
        """First updates in which the critic learns alone."""
        return self.advantage.warmup if isinstance(self.advantage, WithCritic) else 0

    def credit(self, batch: TrainingBatch, signals: ModelOutputs) -> TokenWeights:
        """What each token of a batch is due."""
        rewarded = self.shaping.shaped(batch)
        if self.kl is not None and self.kl.where == "reward":
            rewarded = with_kl_penalty(rewarded, signals)
        estimate = self._checked(self._estimate(rewarded, signals), batch)
        learned = ~batch.token_muted & (batch.chosen if self.masks.loss else True)
        share = _scattered(self._share(batch, learned), learned)
        return TokenWeights(
            advantage=estimate.advantage,
            share=share,
            trust=self._trust(batch, signals),
            imitation=self._imitation(batch),
            targets=estimate.targets,
            kl_coefficient=0.0 if self.kl is None or self.kl.where == "reward" else signals.kl_coefficient,
        )

    def loss(self, view: TokenOutputs, credit: TokenWeights) -> tuple[Tensor, Metrics]:
        """The loss of some tokens, given their credit; those of all micro-batches are summed."""
        moved = self._moved(view)
        weight = credit.share * credit.trust
        policy = (weight * self.surrogate.loss(moved, credit.advantage)).sum()
        metrics = {
            "policy_loss": policy.detach(),
            "clip_fraction": (weight * self.surrogate.bounded(moved, credit.advantage)).sum().detach(),
            "kl_old": (credit.share * kl_k3(view.old, view.logprobs)).sum().detach(),
        }
        total = policy - self.entropy * (credit.share * view.entropy).sum() if self.entropy else policy
        if self.kl is not None and view.reference is not None and self.kl.where == "loss":
            divergence = self.kl.divergence(view.logprobs, view.reference, log_ratio(view.logprobs, view.old))
            total = total + credit.kl_coefficient * (credit.share * divergence).sum()
        if credit.imitation is not None:
            imitated = -(credit.imitation * view.logprobs).sum()
            total, metrics["imitation_loss"] = total + imitated, imitated.detach()
        if view.critic is not None and credit.targets is not None:
            value_loss = self._value_loss(view.critic, credit.targets)
            total, metrics["value_loss"] = total + value_loss, value_loss.detach()
        return total, metrics

    def _moved(self, view: TokenOutputs) -> Moved:
        if self.ratio == "token":
            unit = torch.arange(len(view.old), device=view.old.device)
            return Moved(view.logprobs, view.old, log_ratio(view.logprobs, view.old), unit)
        unit = view.turn if self.ratio == "turn" else view.trajectory
        return Moved(view.logprobs, view.old, unit_log_ratio(view.logprobs, view.old, unit), unit)

    def _value_loss(self, critic: CriticView, targets: ValueTargets) -> Tensor:
        assert isinstance(self.advantage, WithCritic)
        loss = partial(clipped_value_loss, clip=self.advantage.value_clip)
        tokens = targets.token_shares * loss(critic.values, critic.old_values, targets.tokens)
        ends = targets.end_shares * loss(critic.ends, critic.old_ends, targets.ends)
        return tokens.sum() + ends.sum()

    def _checked(self, estimate: Estimate, batch: TrainingBatch) -> Estimate:
        """The estimate, muted trajectories taken out of the critic's targets. InvalidInput where it is none: a part may
        be a user's."""
        name = f"advantage {self.advantage.kind or type(self.advantage).__name__}"
        if not isinstance(estimate, Estimate):
            raise InvalidInput(name, got=f"an object of type {type(estimate).__name__}", do="return an Estimate")
        if estimate.advantage.shape != batch.ids.shape:
            got = f"numbers of shape {tuple(estimate.advantage.shape)}"
            raise InvalidInput(name, got=got, do=f"give one per token: {tuple(batch.ids.shape)}")
        if not bool(estimate.advantage.isfinite().all()):
            raise InvalidInput(name, got="a number that is not finite", do="mend it: no token may be due that")
        targets = estimate.targets
        if targets is None:
            return estimate
        learned = ~batch.token_muted
        return replace(estimate, targets=replace(targets, token_shares=targets.token_shares * learned))

    def _estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        """The estimator's word on all tokens; it sees actions only, unless a mask is off."""
        if not self.masks.loss:
            return self.advantage.estimate(replace(batch, chosen=torch.ones_like(batch.chosen)), signals)
        if not self.masks.advantage or bool(batch.chosen.all()):
            return self.advantage.estimate(batch, signals)
        seen = self.advantage.estimate(batch.actions(), signals.at(batch.chosen))
        spread = partial(_scattered, chosen=batch.chosen)
        targets = seen.targets and replace(
            seen.targets, tokens=spread(seen.targets.tokens), token_shares=spread(seen.targets.token_shares)
        )
        return Estimate(spread(seen.advantage), targets)

    def _share(self, batch: TrainingBatch, learned: Tensor) -> Tensor:
        """The share of each token that is learned from."""
        if not bool(learned.any()):
            return torch.zeros(0, dtype=torch.float64)
        ways: Mapping[Aggregation, Callable[[], Tensor]] = {
            "token_mean": lambda: token_mean(batch.token_turn[learned]),
            "turn_mean": lambda: unit_mean(batch.token_turn[learned]),
            "trajectory_mean": lambda: unit_mean(batch.token_trajectory[learned]),
            "group_mean": lambda: unit_mean(batch.token_group[learned]),
            "constant": lambda: unit_sum(batch.token_trajectory[learned], self.length or 1.0),
        }
        return ways[self.aggregation]()

    def _trust(self, batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
        trust = torch.ones(len(batch.ids), dtype=torch.float64)
        if signals.old is None or not self.compares:
            return trust
        actions = batch.actions()  # observations have no sampler, and would dilute the mean of what they belong to
        disagreement = signals.old[batch.chosen] - actions.sampler_logprobs
        units: Mapping[Level, Tensor] = {
            "token": torch.arange(len(disagreement)),
            "turn": actions.token_turn,
            "trajectory": actions.token_trajectory,
        }
        factor = torch.ones_like(disagreement)
        if self.correction is not None:
            factor = self.correction.weight(disagreement, units[self.correction.level])
        if self.rejection is not None:
            factor = factor * self.rejection.kept(disagreement, units[self.rejection.level])
        return trust.masked_scatter(batch.chosen, factor)

    def _imitation(self, batch: TrainingBatch) -> Tensor | None:
        if not self.imitation and not self.observation:
            return None
        succeeded = (batch.returns > 0)[batch.token_trajectory] & batch.chosen & ~batch.token_muted
        return self.imitation * _evenly(succeeded) + self.observation * _evenly(~batch.chosen)


def _evenly(chosen: Tensor) -> Tensor:
    """Shares of the chosen tokens that add up to 1; none where nothing is chosen."""
    return chosen.double() / max(int(chosen.sum()), 1)


def _scattered(x: Tensor, chosen: Tensor) -> Tensor:
    """Numbers of the chosen tokens on all tokens, 0 elsewhere."""
    return x if len(x) == len(chosen) else torch.zeros(len(chosen), dtype=x.dtype).masked_scatter(chosen, x)
