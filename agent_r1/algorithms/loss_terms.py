"""The optional terms of an algorithm: reward shaping, the KL penalty, and corrections between sampler and trainer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Component, Level
from agent_r1.algorithms.ops.importance_sampling import clamp_log_ratio
from agent_r1.algorithms.ops.kl import kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_unbiased
from agent_r1.algorithms.ops.returns import discounted_sums
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import segment_count, segment_max, segment_mean, segment_sum


class Masks(Component):
    """The advantage mask and the loss mask of paper 2511.14460. They are switched off only for its ablation."""

    advantage: bool = True
    """Advantages are computed over action tokens only. Off: observation tokens are time steps too."""

    loss: bool = True
    """Only action tokens are trained on. Off: the policy is also trained to produce the observations."""


class SoftOverlong(Component):
    """The soft overlong punishment of DAPO (2503.14476, equation 13), a penalty for nearly too long trajectories.

        R_length = 0                                  if |y| <= L_max - L_cache
                   ((L_max - L_cache) - |y|) / L_cache  if L_max - L_cache < |y| <= L_max
                   -1                                 if |y| > L_max

    |y| is the number of action tokens of the trajectory. The default lengths are the paper's.
    """

    max_tokens: int = Field(default=20480, ge=1)
    """L_max: longer trajectories get the whole penalty."""

    cache_tokens: int = Field(default=4096, ge=1)
    """L_cache: the last tokens before L_max, over which the penalty grows."""

    penalty: float = Field(default=1.0, gt=0)
    """The whole penalty."""

    @property
    def formula(self) -> str:
        """The penalty in words, with the values of its settings."""
        start = self.max_tokens - self.cache_tokens
        return f"R less {self.penalty:g} clip((|y| - {start}) / {self.cache_tokens}, 0, 1) for its |y| action tokens"

    def penalties(self, lengths: Tensor) -> Tensor:
        """Return the penalty, at most 0, of trajectories with ``lengths`` action tokens: (M,) -> (M,)."""
        over = lengths - (self.max_tokens - self.cache_tokens)
        return -self.penalty * (over / self.cache_tokens).clamp(0, 1)


class RewardShaping(Component):
    """Changes of the rewards before advantages are computed."""

    length: float = Field(default=0.0, ge=0)
    """Penalty of the group's trajectory with the most action tokens, as a share of the group's mean return; the others
    are penalized in proportion."""

    turns: float = Field(default=0.0, ge=0)
    """Penalty of the group's trajectory with the most turns, as a share of the group's mean return; the others are
    penalized in proportion."""

    process_scale: Literal["none", "largest"] = "none"
    """largest: divide process rewards by the batch's largest sum of them from a token on (Agent-R1)."""

    overlong: SoftOverlong | None = None

    @property
    def formula(self) -> str:
        """The changes in words; empty if there are none."""
        penalties = [f"{share:g} {unit}" for share, unit in ((self.length, "length"), (self.turns, "turns")) if share]
        penalty = (
            f"R less mean R of the group (if above 0) times ({' + '.join(penalties)}, each over the group's largest)"
        )
        scaled = "process rewards over their largest sum from a turn on"
        overlong = [] if self.overlong is None else [self.overlong.formula]
        parts = [*([scaled] if self.process_scale == "largest" else []), *([penalty] if penalties else []), *overlong]
        return "; ".join(parts)

    def apply(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch with shaped rewards."""
        if self.process_scale == "largest":
            # process rewards are the token rewards without the outcomes: (N,)
            outcome = torch.zeros_like(batch.token_rewards).index_add(0, batch.last_tokens, batch.outcome_rewards)
            process = batch.token_rewards - outcome  # (N,)
            largest = discounted_sums(process, batch.token_trajectory, 1.0).abs().max()
            batch = replace(batch, token_rewards=outcome + process / (largest + 1e-6))
        if not self.length and not self.turns and self.overlong is None:
            return batch
        lengths = segment_count(batch.actions().token_trajectory).double()  # (M,)
        penalty = torch.zeros_like(lengths) if self.overlong is None else self.overlong.penalties(lengths)  # (M,)
        if self.length or self.turns:
            penalty = penalty + self._relative_penalties(batch, lengths)
        rewards = batch.token_rewards.index_add(0, batch.last_tokens, penalty)  # (N,) part of the outcome
        return replace(batch, token_rewards=rewards, outcome_rewards=batch.outcome_rewards + penalty)

    def _relative_penalties(self, batch: TrainingBatch, lengths: Tensor) -> Tensor:
        """Return the penalties relative to the group's longest trajectory, (M,)."""
        group = batch.trajectory_group
        turns = segment_count(batch.turn_trajectory).double()  # (M,)
        # share of the group's mean return, relative to its longest trajectory: (M,)
        share = self.length * lengths / segment_max(lengths, group)[group]
        share = share + self.turns * turns / segment_max(turns, group)[group]
        return -segment_mean(batch.returns, group).clamp(min=0)[group] * share  # none if the mean is negative


KlEstimator = Literal["k1", "k2", "k3", "k3_plus", "k3_unbiased"]

KL_FORMULAS = {
    "k1": "log(pi / ref)",
    "k2": "log(pi / ref)^2 / 2",
    "k3": "ref / pi - 1 - log(ref / pi)",
    "k3_plus": "k3 with the gradient of k2",
    "k3_unbiased": "r k3",
}


class Kl(Component):
    """A KL penalty towards the reference policy, the policy before training."""

    coefficient: float = Field(default=0.001, gt=0)
    """Weight of the penalty; the initial weight if there is a target."""

    estimator: KlEstimator = "k3_plus"
    """How the divergence is estimated. As a loss, k1 has no gradient in expectation, and k3 has the gradient
    of KL(ref || pi).
    """

    bound: float | None = Field(default=None, gt=0)
    """Largest value of the k3 estimators at a token; none: unbounded. verl's is 10. Beyond it k3 has no gradient."""

    sync_steps: int = Field(default=0, ge=0)
    """Steps after which the reference moves towards the policy: reference <- alpha policy + (1 - alpha) reference; 0:
    never, the reference stays the policy before training."""

    sync_alpha: float = Field(default=0.6, gt=0, le=1)
    """That alpha (TRL's ref_model_mixup_alpha, 2404.09656); 1: the reference becomes the policy."""

    placement: Literal["loss", "reward"] = "loss"
    """Whether the penalty is a term of the loss, or subtracted from the reward of each token (then it is k1)."""

    target: float | None = Field(default=None, gt=0)
    """The divergence per token that the coefficient is adapted to (1909.08593, section 2.2); none: it is constant."""

    horizon: float = Field(default=10000.0, gt=0)
    """Number of trajectories over which the coefficient changes by e^0.2, if the divergence is off by a fifth or more.
    """

    @property
    def formula(self) -> str:
        """The penalty in words, with the values of its settings."""
        adapted = "" if self.target is None else f", adapted to {self.target:g} over {self.horizon:g} trajectories"
        place = "in the loss" if self.placement == "loss" else "off each token's reward"
        bounded = "" if self.bound is None else f", k3 at most {self.bound:g}"
        moved = f"; every {self.sync_steps} steps ref <- {self.sync_alpha:g} pi + {1 - self.sync_alpha:g} ref"
        formula = f"{self.coefficient:g} KL {place}{adapted}; KL = {KL_FORMULAS[self.estimator]}{bounded}"
        return formula + (moved if self.sync_steps else "")

    def divergence(self, logprobs: Tensor, reference_logprobs: Tensor, ratio: Tensor) -> Tensor:
        """Return the estimate of KL(pi || ref) at each token, with the estimator's gradient: (n,).

        ``ratio`` (n,) is pi / pi_old of each token.
        """
        match self.estimator:
            case "k1":
                return kl_k1(logprobs, reference_logprobs)
            case "k2":
                return kl_k2(logprobs, reference_logprobs)
            case "k3":
                return kl_k3(logprobs, reference_logprobs, self.bound)
            case "k3_plus":
                return kl_k3_plus(logprobs, reference_logprobs, self.bound)
            case "k3_unbiased":
                return kl_k3_unbiased(logprobs, reference_logprobs, ratio, self.bound)

    def adapt_coefficient(self, coefficient: float, divergence: float, trajectories: int) -> float:
        """Return the coefficient for the next update (1909.08593, section 2.2).

            error = clip(divergence / target - 1, -0.2, 0.2)
            coefficient <- coefficient * exp(error * trajectories / horizon)

        The exponential keeps the coefficient positive, however many trajectories an update has.
        """
        if self.target is None:
            return coefficient
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return coefficient * math.exp(error * trajectories / self.horizon)


def with_kl_penalty(batch: TrainingBatch, reference_logprobs: Tensor | None, coefficient: float) -> TrainingBatch:
    """Return the batch with coefficient * log(mu / ref) subtracted from the reward of each action token."""
    if reference_logprobs is None:
        raise TypeError("a KL in the reward needs a reference's log-probabilities")
    divergence = torch.where(batch.action_mask, kl_k1(batch.sampler_logprobs, reference_logprobs), 0.0)  # (N,)
    return replace(batch, token_rewards=batch.token_rewards - coefficient * divergence)


class Correction(Component):
    """An importance weight on the policy loss that corrects the mismatch between trainer and sampler.

    w = pi_old / mu; pi_old is the trainer's policy before the update, mu the sampler's policy.
    """

    rule: Literal["truncate", "window"] = "truncate"
    """truncate: min(w, high), truncated importance sampling (TIS). window: w if low <= w <= high, else 0 (IcePop)."""

    level: Level = "token"
    """w is the product of the ratios of this unit."""

    low: float = Field(default=0.5, ge=0)
    """Least ratio inside the window."""

    high: float = Field(default=2.0, gt=0)
    """Largest ratio, or largest inside the window."""

    @property
    def formula(self) -> str:
        """The weight in words, with the values of its settings."""
        weight = (
            f"min(w, {self.high:g})" if self.rule == "truncate" else f"w inside [{self.low:g}, {self.high:g}], else 0"
        )
        return f"each token times {weight}; w = pi_old / mu of the {self.level}"

    def weight(self, log_ratio: Tensor, unit: Tensor) -> Tensor:
        """Return the importance weight of each token, from log(pi_old / mu) and its unit: (n,), (n,) -> (n,)."""
        ratio = clamp_log_ratio(segment_sum(log_ratio, unit)[unit]).exp()  # (n,) product over the unit
        if self.rule == "truncate":
            return ratio.clamp(max=self.high)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


class Rejection(Component):
    """Rejection of whole tokens, turns or trajectories whose ratio w = pi_old / mu is outside a window."""

    level: Level = "trajectory"
    """The unit that is rejected as a whole."""

    statistic: Literal["mean", "product"] = "mean"
    """mean: the geometric mean of the unit's ratios (Geo-RS); product: their product (MIS)."""

    low: float = Field(default=0.99, ge=0)
    """Least ratio that is accepted."""

    high: float = Field(default=1.01, gt=0)
    """Largest ratio that is accepted."""

    denominator: Literal["all", "accepted"] = "all"
    """Tokens that the loss is averaged over: all of them, or the accepted ones only (verl), also for KL and entropy."""

    @property
    def formula(self) -> str:
        """The rule in words, with the values of its settings."""
        return (
            f"each {self.level} left out whose {self.statistic} of pi_old / mu is not in [{self.low:g}, {self.high:g}]"
            + (", and out of the denominators" if self.denominator == "accepted" else "")
        )

    def accepted(self, log_ratio: Tensor, unit: Tensor) -> Tensor:
        """Return which tokens are accepted, from log(pi_old / mu) and their units: (n,), (n,) -> (n,) bool."""
        reduce = segment_mean if self.statistic == "mean" else segment_sum
        ratio = clamp_log_ratio(reduce(log_ratio, unit)[unit]).exp()  # (n,) of the unit
        return (ratio >= self.low) & (ratio <= self.high)
