"""The smaller parts of an algorithm: how rewards are shaped, what is held close, what is corrected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Level, Component
from agent_r1.algorithms.ops.divergence import kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_unbiased
from agent_r1.algorithms.ops.importance_sampling import mean_log_ratio, product_log_ratio, truncated, windowed, within
from agent_r1.algorithms.ops.returns import discounted_sums
from agent_r1.algorithms.signals import ModelOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import segment_count, segment_mean


class Masks(Component):
    """The two masks of paper 2511.14460, to be switched off for its ablation only."""

    advantage: bool = True
    """Credit sees action tokens only. Off: observations are steps like any other."""

    loss: bool = True
    """Action tokens only are learned from. Off: the policy is pushed to say what the world said."""


class RewardShaping(Component):
    """What is done to rewards before credit is assigned."""

    length: float = Field(default=0.0, ge=0)
    """Share of the group's mean return that its trajectory of most action tokens is fined; others in proportion."""

    turns: float = Field(default=0.0, ge=0)
    """Share of the group's mean return that its trajectory of most turns is fined; others in proportion."""

    process_scale: Literal["none", "largest"] = "none"
    """Whether process rewards are divided by the batch's largest sum of them from a turn on (Agent-R1)."""

    @property
    def formula(self) -> str:
        fines = [f"{share:g} {what}" for share, what in ((self.length, "length"), (self.turns, "turns")) if share]
        fined = f"R less mean R of the group (if above 0) times ({' + '.join(fines)}, each over the group's largest)"
        scaled = "process rewards over their largest sum from a turn on"
        return "; ".join([*([scaled] if self.process_scale == "largest" else []), *([fined] if fines else [])])

    def shaped(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with rewards shaped."""
        if self.process_scale == "largest":
            batch = _process_scaled(batch)
        if not self.length and not self.turns:
            return batch
        lengths = segment_count(batch.actions().token_trajectory).double()
        turns = segment_count(batch.turn_trajectory).double()
        group = batch.trajectory_group
        share = self.length * lengths / _largest(lengths, group) + self.turns * turns / _largest(turns, group)
        fine = -segment_mean(batch.returns, group).clamp(min=0)[group] * share
        rewards = batch.token_rewards.index_add(0, batch.last_tokens, fine)
        return replace(batch, token_rewards=rewards, outcomes=batch.outcomes + fine)


def _largest(x: Tensor, key: Tensor) -> Tensor:
    """Per element, the largest of its group."""
    return x.new_zeros(int(key.max()) + 1).scatter_reduce(0, key, x, "amax")[key]


def _process_scaled(batch: TrainingBatch) -> TrainingBatch:
    outcome = torch.zeros_like(batch.token_rewards).index_add(0, batch.last_tokens, batch.outcomes)
    process = batch.token_rewards - outcome
    largest = discounted_sums(process, batch.token_before, 1.0).abs().max()
    return replace(batch, token_rewards=outcome + process / (largest + 1e-6))


Estimator = Literal["k1", "k2", "k3", "k3_plus", "k3_unbiased"]

KL_FORMULAS = {
    "k1": "log(pi / ref)",
    "k2": "log(pi / ref)^2 / 2",
    "k3": "ref / pi - 1 - log(ref / pi)",
    "k3_plus": "k3 with the gradient of k2",
    "k3_unbiased": "r k3",
}


class Kl(Component):
    """What holds the policy close to the one it began as."""

    coefficient: float = Field(default=0.001, gt=0)
    """Weight of the divergence; where a target is given, the first one."""

    estimator: Estimator = "k3_plus"
    """How it is estimated. As a loss k1 does nothing in expectation and k3 pulls as KL(ref || pi) does."""

    where: Literal["loss", "reward"] = "loss"
    """Whether it is a loss of its own, or taken off the reward of each token (then it is k1)."""

    target: float | None = Field(default=None, gt=0)
    """The divergence per token that the coefficient is steered to (1909.08593, section 2.2); none: it stays."""

    horizon: float = Field(default=10000.0, gt=0)
    """Trajectories over which the coefficient changes by e^0.2 where the divergence is a fifth off or more."""

    @property
    def formula(self) -> str:
        steered = "" if self.target is None else f", steered to {self.target:g} over {self.horizon:g} trajectories"
        place = "in the loss" if self.where == "loss" else "off each token's reward"
        return f"{self.coefficient:g} KL {place}{steered}; KL = {KL_FORMULAS[self.estimator]}"

    def divergence(self, logprobs: Tensor, reference: Tensor, log_ratios: Tensor) -> Tensor:
        """(n,) per token, with the estimator's gradient."""
        if self.estimator == "k3_unbiased":
            return kl_k3_unbiased(logprobs, reference, log_ratios.exp())
        return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3_plus": kl_k3_plus}[self.estimator](logprobs, reference)

    def steered(self, coefficient: float, divergence: float, trajectories: int) -> float:
        """The next coefficient after an update over so many trajectories with this divergence per token."""
        if self.target is None:
            return coefficient
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return coefficient * math.exp(error * trajectories / self.horizon)  # stays positive, whatever the batch


class Correction(Component):
    """Weighs the policy loss where the trainer finds a token as likely as pi_old, and the sampler as mu."""

    rule: Literal["truncate", "window"] = "truncate"
    """truncate: min(r, high) (TIS). window: r inside [low, high], 0 outside (IcePop)."""

    level: Level = "token"
    """Of what the ratio r = pi_old / mu is the product."""

    low: float = Field(default=0.5, ge=0)
    """Least ratio inside the window."""

    high: float = Field(default=2.0, gt=0)
    """Largest ratio that counts."""

    @property
    def formula(self) -> str:
        weight = (
            f"min(w, {self.high:g})" if self.rule == "truncate" else f"w inside [{self.low:g}, {self.high:g}], else 0"
        )
        return f"each token times {weight}; w = pi_old / mu of the {self.level}"

    def weight(self, log_ratios: Tensor, unit: Tensor) -> Tensor:
        """(N,) factor of each token's loss."""
        ratios = product_log_ratio(log_ratios, unit)
        return truncated(ratios, self.high) if self.rule == "truncate" else windowed(ratios, self.low, self.high)


class Rejection(Component):
    """Leaves out whole turns or trajectories at which sampler and trainer disagree."""

    level: Level = "trajectory"
    """What is left out together."""

    statistic: Literal["mean", "product"] = "mean"
    """mean: the geometric mean of the ratios pi_old / mu (Geo-RS); product: their product (MIS)."""

    low: float = Field(default=0.99, ge=0)
    """Least ratio that is kept."""

    high: float = Field(default=1.01, gt=0)
    """Largest ratio that is kept."""

    @property
    def formula(self) -> str:
        return (
            f"each {self.level} left out whose {self.statistic} of pi_old / mu is not in [{self.low:g}, {self.high:g}]"
        )

    def kept(self, log_ratios: Tensor, unit: Tensor) -> Tensor:
        """(N,) whether each token counts."""
        reduce = mean_log_ratio if self.statistic == "mean" else product_log_ratio
        return within(reduce(log_ratios, unit), self.low, self.high)


def with_kl_penalty(batch: TrainingBatch, signals: ModelOutputs) -> TrainingBatch:
    """The batch with the divergence of its tokens' sampler from the reference taken off each action token's reward."""
    if signals.reference is None:
        raise TypeError("a KL in the reward needs a reference's log-probabilities")
    divergence = torch.where(batch.chosen, kl_k1(batch.sampler_logprobs, signals.reference), 0.0)
    return replace(batch, token_rewards=batch.token_rewards - signals.kl_coefficient * divergence)
