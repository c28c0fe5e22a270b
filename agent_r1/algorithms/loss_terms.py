"""Optional terms of an algorithm: masks, KL penalty, distillation, and corrections of the mismatch with the sampler.

pi is the current policy, pi_old the policy before the update, and mu the sampler's policy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import clamp_log_ratio, kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_unbiased
from agent_r1.algorithms.types import Component, Level, ModelOutputs, TokenOutputs, require
from agent_r1.data.batch import TrainingBatch, index_within, segment_mean, segment_sum


class Masks(Component):
    """Masks that restrict advantages and the policy loss to action tokens (Agent-R1, arXiv:2511.14460)."""

    advantage: bool = True
    """Whether advantages are computed over action tokens only. If not, observation tokens are also time steps."""

    loss: bool = True
    """Whether the policy is trained on action tokens only. If not, it is also trained on observation tokens."""


KlEstimator = Literal["k1", "k2", "k3", "k3_plus", "k3_unbiased"]

KL_FORMULAS = {
    "k1": "log(pi / ref)",
    "k2": "log(pi / ref)^2 / 2",
    "k3": "ref / pi - 1 - log(ref / pi)",
    "k3_plus": "k3 with the gradient of k2",
    "k3_unbiased": "r k3",
}


class Kl(Component):
    """A penalty on the KL divergence of the policy from the reference policy (initially the policy before training)."""

    coefficient: float = Field(default=0.001, gt=0)
    """Weight of the penalty. If ``target`` is set, this is only the initial weight."""

    estimator: KlEstimator = "k3_plus"
    """Estimator of KL(pi || ref), with the policy pi and the reference policy ref (see ``kl_k1``, ``kl_k2``, .. in
    ``algorithms/ops.py``). The expected gradient is 0 for k1, the gradient of KL(ref || pi) for k3, and the gradient of
    KL(pi || ref) for all other estimators."""

    bound: float | None = Field(default=None, gt=0)
    """Limit of the KL estimate at a token, only for the estimators k3, k3_plus and k3_unbiased. A larger estimate is
    replaced by the limit. With k3, a replaced estimate has no gradient. With k3_plus, the gradient does not change.
    With k3_unbiased, the limit applies before the multiplication by the importance ratio. In verl, the limit is 10.
    none: no limit."""

    sync_steps: int = Field(default=0, ge=0)
    """Number of steps between changes of the reference policy (see ``sync_alpha``). 0: the reference policy is always
    the policy before training."""

    sync_alpha: float = Field(default=0.6, gt=0, le=1)
    """alpha in each change of the reference policy: the new reference policy is alpha * policy + (1 - alpha) * old
    reference policy (``ref_model_mixup_alpha`` in TRL, arXiv:2404.09656)."""

    placement: Literal["loss", "reward"] = "loss"
    """Where the penalty is applied. loss: a term of the loss. reward: the penalty, estimated by k1, is subtracted from
    the reward of each action token."""

    target: float | None = Field(default=None, gt=0)
    """Desired KL divergence per token. Each update increases the coefficient if the divergence is larger, and decreases
    the coefficient if the divergence is smaller (arXiv:1909.08593, section 2.2). none: the coefficient is constant."""

    horizon: float = Field(default=10000.0, gt=0)
    """How slowly the coefficient adapts to ``target``, as a number of trajectories. During this number of trajectories,
    the coefficient grows by 22 % if the divergence is at least 20 % above ``target``. It shrinks by 18 % if the
    divergence is at least 20 % below ``target``. Closer to ``target``, the coefficient changes less."""

    @property
    def formula(self) -> str:
        adapted = "" if self.target is None else f", adapted to {self.target:g} over {self.horizon:g} trajectories"
        place = "in the loss" if self.placement == "loss" else "off each token's reward"
        bounded = "" if self.bound is None else f", k3 at most {self.bound:g}"
        moved = f"; every {self.sync_steps} steps ref <- {self.sync_alpha:g} pi + {1 - self.sync_alpha:g} ref"
        formula = f"{self.coefficient:g} KL {place}{adapted}; KL = {KL_FORMULAS[self.estimator]}{bounded}"
        return formula + (moved if self.sync_steps else "")

    def divergence(self, logprobs: Tensor, reference_logprobs: Tensor, ratio: Tensor) -> Tensor:
        """Return the estimate of KL(pi || ref) with gradient: (n,). Only "k3_unbiased" uses ``ratio``, pi / pi_old."""
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
        """Return the coefficient of the KL penalty for the next update (arXiv:1909.08593, section 2.2).

            error = clip(divergence / target - 1, -0.2, 0.2)
            coefficient <- coefficient * exp(error * trajectories / horizon)

        The paper has the factor 1 + 0.1 * error. ``divergence`` is the mean KL per token, in nats, and ``trajectories``
        the number of trajectories, in this update.
        """
        if self.target is None:
            return coefficient
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return coefficient * math.exp(error * trajectories / self.horizon)


def with_kl_penalty(batch: TrainingBatch, reference_logprobs: Tensor | None, coefficient: float) -> TrainingBatch:
    """Return the batch with ``coefficient`` * log(mu / ref) subtracted from the reward of each action token."""
    if reference_logprobs is None:
        raise TypeError("a KL in the reward needs a reference's log-probabilities")
    divergence = torch.where(batch.action_mask, kl_k1(batch.sampler_logprobs, reference_logprobs), 0.0)  # (N,)
    return replace(batch, token_rewards=batch.token_rewards - coefficient * divergence)


SMALLEST_REST = 1e-7  # replaces a smaller total probability of the tokens outside the teacher's top k


class Distillation(Component):
    """A term of the loss: KL(teacher || policy) over the teacher's k most likely tokens.

    p(v) is the teacher's probability of token v, and pi(v) the policy's, at the sampler's temperature. p_rest and
    pi_rest are the total probabilities of all other tokens. The divergence at a position is

        D = sum_{v in top k} p(v) log(p(v) / pi(v)) + p_rest log(p_rest / pi_rest)

    If ``tail`` is "ignored", the last term is left out. The positions belong to trajectories that the policy itself
    sampled (on-policy distillation, arXiv:2306.13649).
    """

    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the distillation term."""

    top_k: int = Field(default=64, ge=1)
    """k: number of the teacher's most likely tokens at each position. A number above the size of the vocabulary means
    the whole vocabulary."""

    tail: Literal["bucket", "ignored"] = "bucket"
    """Treatment of all tokens outside the teacher's top k. bucket: they count as one token (``forward_kl_topk_tail`` in
    verl, ``loss_add_tail`` in TRL). ignored: they have no term (``forward_kl_topk`` in verl), and a negative divergence
    is replaced by 0, without gradient."""

    bound: float | None = Field(default=None, gt=0)
    """Limit of the divergence at a token (``loss_max_clamp`` in verl). A larger divergence is replaced by this number,
    and has no gradient. none: no limit."""

    @property
    def formula(self) -> str:
        tokens = f"the teacher's top {self.top_k} tokens" + (" and one for the rest" if self.tail == "bucket" else "")
        bounded = "" if self.bound is None else f", at most {self.bound:g}"
        return f"less {self.coefficient:g} KL(teacher || pi) over {tokens}{bounded}"

    def divergence(self, tokens: TokenOutputs) -> Tensor:
        """Return D at the position of each of n tokens, with gradient: (n,)."""
        logprobs = require(tokens.top_logprobs, "the policy's log-probabilities of the teacher's top tokens")  # (n, k)
        teacher_logprobs = require(tokens.teacher_top_logprobs, "the teacher's top tokens")  # (n, k)
        teacher = teacher_logprobs.exp()
        # a token with p = 0 adds 0, also if log p is -inf
        divergence = torch.where(teacher > 0, teacher * (teacher_logprobs - logprobs), 0.0).sum(-1)  # (n,)
        if self.tail == "ignored":
            divergence = divergence.clamp(min=0)
        else:
            teacher_rest = (1 - teacher.sum(-1)).clamp(min=0)  # (n,); below 0 by rounding only
            rest = (1 - logprobs.exp().sum(-1)).clamp(min=SMALLEST_REST)  # (n,)
            divergence = divergence + torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * rest.log()
        return divergence if self.bound is None else divergence.clamp(max=self.bound)


class Correction(Component):
    """An importance weight on the policy loss that corrects the mismatch between trainer and sampler.

    The weight is computed from the ratio w = pi_old / mu of a token, turn or trajectory.
    """

    rule: Literal["truncate", "window"] = "truncate"
    """Formula of the importance weight. The ratio w is the probability under the policy before the update, divided by
    the probability under the sampler's policy. truncate: min(w, high), truncated importance sampling (TIS). window: w
    if w is in [low, high], else 0 (IcePop)."""

    level: Level = "token"
    """Tokens that share one importance weight. token: each token has its own weight. turn: the tokens of a turn.
    trajectory: the tokens of a trajectory. The weight is computed from the product w of the ratios of the tokens. The
    ratio of a token is its probability under the policy before the update, divided by its probability under the
    sampler's policy."""

    low: float = Field(default=0.5, ge=0)
    """With the rule "window": smallest ratio w that is not replaced by 0. The rule "truncate" does not use this
    number."""

    high: float = Field(default=2.0, gt=0)
    """Largest importance weight with the rule "truncate". With the rule "window": largest ratio w that is not
    replaced by 0."""

    @property
    def formula(self) -> str:
        weight = (
            f"min(w, {self.high:g})" if self.rule == "truncate" else f"w inside [{self.low:g}, {self.high:g}], else 0"
        )
        return f"each token times {weight}; w = pi_old / mu of the {self.level}"

    def weight(self, log_ratio: Tensor, unit: Tensor) -> Tensor:
        """Return the weight of each token from log(pi_old / mu), equal in a ``unit``: (n,)."""
        ratio = clamp_log_ratio(segment_sum(log_ratio, unit)[unit]).exp()  # (n,) product over the unit
        if self.rule == "truncate":
            return ratio.clamp(max=self.high)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


class Rejection(Component):
    """A rule that masks tokens, turns or trajectories whose probabilities differ too much in trainer and sampler.

    The unit is masked if the mean or product of its ratios pi_old / mu is outside [``low``, ``high``]. A masked token
    has no policy loss.
    """

    level: Level = "trajectory"
    """The unit (token, turn or trajectory) that is accepted or rejected as a whole."""

    statistic: Literal["mean", "product"] = "mean"
    """How the ratios of the tokens of a unit (see ``level``) become one number, which is compared with ``low`` and
    ``high``. mean: their geometric mean (Geo-RS). product: their product (MIS). The ratio of a token is its probability
    under the policy before the update, divided by its probability under the sampler's policy."""

    low: float = Field(default=0.99, ge=0)
    """A token, turn or trajectory (see ``level``) is rejected if the mean or product of its ratios (see ``statistic``)
    is below this number."""

    high: float = Field(default=1.01, gt=0)
    """A token, turn or trajectory (see ``level``) is rejected if the mean or product of its ratios (see ``statistic``)
    is above this number."""

    denominator: Literal["all", "accepted"] = "all"
    """Tokens that count in the denominators of the loss, and get KL penalty and entropy bonus. all: accepted and
    rejected tokens. accepted: only accepted tokens, as in verl."""

    @property
    def formula(self) -> str:
        return (
            f"each {self.level} left out whose {self.statistic} of pi_old / mu is not in [{self.low:g}, {self.high:g}]"
            + (", and out of the denominators" if self.denominator == "accepted" else "")
        )

    def accepted(self, log_ratio: Tensor, unit: Tensor) -> Tensor:
        """Return whether each token is accepted, from log(pi_old / mu), equal in a ``unit``: (n,) bool."""
        reduce = segment_mean if self.statistic == "mean" else segment_sum
        ratio = clamp_log_ratio(reduce(log_ratio, unit)[unit]).exp()  # (n,) w of the unit of each token
        return (ratio >= self.low) & (ratio <= self.high)


def mismatch(batch: TrainingBatch, old_logprobs: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return (log(pi_old / mu), index of the token, turn or trajectory) of the n action tokens: (n,) each."""
    actions = batch.actions()
    log_ratio = old_logprobs[batch.action_mask] - actions.sampler_logprobs  # (n,)
    units: Mapping[Level, Tensor] = {
        "token": torch.arange(len(log_ratio)),
        "turn": actions.token_turn,
        "trajectory": actions.token_trajectory,
    }
    return log_ratio, units[level]


class TokenMask(Component, ABC):
    """A rule that masks some of the n tokens that are trained on. A masked token has no policy loss."""

    name: str = ""

    compares_sampler: ClassVar[bool] = False
    """Whether the mask compares the policies of trainer and sampler. If so, a forward pass before the update is
    needed."""
    needs_entropy: ClassVar[bool] = False
    """Whether the mask depends on the entropy of the policy before the update. If so, a forward pass before the update
    is needed."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """A description of the masked or kept tokens, with the values of the settings."""

    @abstractmethod
    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        """Return for each of the n tokens, to which all is reduced, whether it has a policy loss: (n,) bool."""


class SecondMoment(TokenMask):
    """A rule that masks the tokens whose probabilities differ most in trainer and sampler: M2PO (arXiv:2510.01161).

    The tokens with the largest (log(pi_old / mu))^2 are masked, until its mean over all unmasked tokens is at most
    ``threshold`` (``_apply_m2po_masking`` in AReaL).
    """

    name: Literal["second_moment"] = "second_moment"
    compares_sampler: ClassVar[bool] = True

    threshold: float = Field(default=0.04, gt=0)
    """Largest mean of (log(pi_old / mu))^2 over the tokens that have a policy loss. pi_old is the policy before the
    update, and mu is the sampler's policy. If the mean over all tokens is larger, the tokens with the largest
    (log(pi_old / mu))^2 are masked."""

    @property
    def formula(self) -> str:
        return f"without the tokens of largest (log(pi_old / mu))^2, until its mean is at most {self.threshold:g}"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        old_logprobs = require(outputs.old_logprobs, "log-probabilities before the update")
        squares = _without_noise((old_logprobs - batch.sampler_logprobs).square())  # (n,)
        ordered = squares.sort().values
        # the means of the 1, 2, .. n smallest squares do not decrease; equal squares are kept or masked together
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)  # (n,)
        first_masked = torch.searchsorted(ordered, ordered[means > self.threshold][:1])  # (1,) or (0,)
        return squares < ordered[first_masked] if len(first_masked) else torch.ones_like(squares, dtype=torch.bool)


class TopEntropy(TokenMask):
    """A rule that keeps only the tokens with the largest entropy of the policy ("forking tokens", arXiv:2506.01939).

    A token is kept if its entropy is at least the (1 - ``share``) quantile of the batch (``top_entropy_quantile`` in
    TRL).
    """

    name: Literal["top_entropy"] = "top_entropy"
    needs_entropy: ClassVar[bool] = True

    share: float = Field(default=0.2, gt=0, lt=1)
    """This share of the tokens has a policy loss: the tokens with the largest entropy."""

    @property
    def formula(self) -> str:
        return f"only at the {self.share:g} of tokens with the largest entropy of pi_old"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        entropy = _without_noise(require(outputs.entropy, "the entropy of the policy"))  # (n,)
        # rank of the quantile 1 - share; without 1e-9, a rounding error could turn a whole number into the next rank
        rank = math.ceil((1 - self.share) * (len(entropy) - 1) - 1e-9)
        return entropy >= entropy.sort().values[rank]


class ClipCov(TokenMask):
    """A rule that masks a few random tokens with a large covariance of advantage and log-probability: Clip-Cov
    (arXiv:2505.22617).

    max(``share`` * number of tokens, 1) tokens are drawn from those with ``low`` < covariance < ``high``.
    """

    name: Literal["clip_cov"] = "clip_cov"

    share: float = Field(default=2e-4, gt=0, lt=1)
    """Masked share of all tokens, at least 1 token. The tokens are drawn from the candidates: those whose covariance of
    advantage and log-probability is between ``low`` and ``high``. If there are fewer, all candidates are masked."""

    low: float = 1.0
    """Only tokens whose covariance of advantage and log-probability is above this number can be masked."""

    high: float = 5.0
    """Only tokens whose covariance of advantage and log-probability is below this number can be masked."""

    @property
    def formula(self) -> str:
        return f"without {self.share:g} of the tokens, drawn from those with {self.low:g} < cov < {self.high:g}"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        cov = covariance(batch, outputs, advantage)  # (n,)
        candidates = ((cov > self.low) & (cov < self.high)).nonzero().squeeze(1)
        # The random number of a token depends only on the attempt and on the index of the token in the attempt. So a
        # repeated or resumed run masks the same tokens.
        place = index_within(batch.token_trajectory)[candidates].tolist()
        attempts = [batch.attempts[number] for number in batch.token_trajectory[candidates].tolist()]
        lots = torch.tensor([attempt.seed(0, index) for attempt, index in zip(attempts, place, strict=True)])
        drawn = lots.argsort()[: max(int(self.share * len(cov)), 1)]
        return torch.ones(len(cov), dtype=torch.bool).index_fill(0, candidates[drawn], False)


class KlCov(Component):
    """A penalty |log(pi / pi_old)| on the tokens with the largest covariance: KL-Cov (arXiv:2505.22617)."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """The tokens with the largest covariance of advantage and log-probability get the penalty. The number of these
    tokens is this share of all tokens, but at least 1."""

    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty in the loss."""

    @property
    def formula(self) -> str:
        return f"less {self.coefficient:g} |log(pi / pi_old)| at the {self.share:g} of tokens with the largest cov"

    def weight(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        """Return the weight of the penalty for each of the n tokens of ``batch``: (n,)."""
        cov = _without_noise(covariance(batch, outputs, advantage))  # (n,)
        least = cov.topk(max(int(self.share * len(cov)), 1)).values[-1]  # all tokens with cov >= least are penalized
        return self.coefficient * (cov >= least).double()


class OffPolicyMask(Component):
    """Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, equation 9).

    A token is masked if A < 0 and the mean of log(mu / pi) over its trajectory is above ``threshold``. pi is the policy
    in the current minibatch.
    """

    threshold: float = Field(default=0.5, gt=0)
    """Limit of the mean of log(mu / pi) over a trajectory, with the sampler's policy mu and the current policy pi. If
    the mean is above the limit, all tokens with a negative advantage are masked in this trajectory."""

    @property
    def formula(self) -> str:
        return f"without tokens with A < 0 of trajectories whose mean of log(mu / pi) is above {self.threshold:g}"

    def kept(self, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return for each of the n tokens of whole trajectories whether it has a policy loss: (n,) bool."""
        sampler_logprobs = require(tokens.sampler_logprobs, "the sampler's log-probabilities")
        trajectory = require(tokens.trajectory, "the trajectory of each token")
        moved = segment_mean(sampler_logprobs - tokens.logprobs.detach(), trajectory)[trajectory]  # (n,)
        return (advantage >= 0) | (moved <= self.threshold)


class Llds(Component):
    """A penalty on falling likelihoods of good actions: LLDS (arXiv:2512.04220), gated by action.

    For the tokens of an action a with A >= 0, if log pi_old(a) > log pi(a):

        max(0, log(pi_old / pi))

    It acts from the second optimizer step on a batch on: before, pi is pi_old.
    """

    coefficient: float = Field(default=0.1, gt=0)
    """Weight of the penalty in the loss."""

    @property
    def formula(self) -> str:
        return f"less {self.coefficient:g} max(0, log(pi_old / pi)) in turns with A >= 0 that became less likely"

    def penalty(self, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return the penalty of each of n tokens of whole turns, with gradient: (n,)."""
        turn = require(tokens.turn, "the turn of each token")
        fall = tokens.old_logprobs - tokens.logprobs  # (n,) log(pi_old / pi)
        fell = segment_sum(fall.detach(), turn)[turn] > 0  # (n,) whether the whole action became less likely
        return fall.clamp(min=0) * ((advantage >= 0) & fell)


def covariance(batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
    """Return the contribution of each of n tokens to the covariance of advantage A and log-probability: (n,).

        cov = (A - mean A) (log pi_old - mean log pi_old)

    If log pi_old was not computed, the sampler's log-probability replaces it. The means are over the n tokens.
    """
    logprobs = batch.sampler_logprobs if outputs.old_logprobs is None else outputs.old_logprobs  # (n,)
    return (advantage - advantage.mean()) * (logprobs - logprobs.mean())


def _without_noise(x: Tensor) -> Tensor:
    # rounding errors must not decide comparisons
    return x.round(decimals=9)
