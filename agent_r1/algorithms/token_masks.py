"""Rules that mask or penalize some tokens in the loss: token masks, the off-policy sequence mask, and KL-Cov.

A masked token has no policy loss, but still counts in the denominators and in other terms of the loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import require
from agent_r1.algorithms.component import Component
from agent_r1.algorithms.types import ModelOutputs, TokenOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import index_within, segment_mean


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
        """Return for each of the n tokens whether the token has a policy loss: (n,) bool.

        Args:
            batch: The batch, reduced to the n tokens.
            outputs: The outputs of the models before the update.
            advantage: (n,) The advantages.
        """


class SecondMoment(TokenMask):
    """A rule that masks the tokens whose probabilities differ most in trainer and sampler: M2PO (arXiv:2510.01161).

    pi_old is the policy before the update, and mu is the sampler's policy. The tokens with the largest
    (log(pi_old / mu))^2 are masked, until the mean of (log(pi_old / mu))^2 over all unmasked tokens is at most
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

    A token is kept if its entropy is at least the (1 - ``share``) quantile of the entropies in the batch. In TRL,
    ``share`` is called ``top_entropy_quantile``.
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

    The masked tokens are drawn from the candidates: the tokens with ``low`` < :func:`covariance` < ``high``. The number
    of masked tokens is ``share`` times the number of all tokens, but at least 1. If there are fewer candidates, all
    candidates are masked.
    """

    name: Literal["clip_cov"] = "clip_cov"

    share: float = Field(default=2e-4, gt=0, lt=1)
    """Candidates are the tokens whose covariance of advantage and log-probability is between ``low`` and ``high``. The
    number of masked candidates is this share of all tokens, but at least 1. If there are fewer candidates, all
    candidates are masked."""

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
    """A penalty |log(pi / pi_old)| on a few tokens: KL-Cov (arXiv:2505.22617).

    The penalty is on the tokens with the largest covariance of advantage and log-probability (:func:`covariance`).
    pi_old is the policy before the update.
    """

    share: float = Field(default=2e-4, gt=0, le=1)
    """The tokens with the largest covariance of advantage and log-probability get the penalty. The number of these
    tokens is this share of all tokens, but at least 1."""

    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty in the loss."""

    @property
    def formula(self) -> str:
        return f"less {self.coefficient:g} |log(pi / pi_old)| at the {self.share:g} of tokens with the largest cov"

    def weight(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        """Return the weight of the penalty |log(pi / pi_old)| for each of the n tokens of ``batch``: (n,).

        Only the tokens with the largest :func:`covariance` have a weight above 0.
        """
        cov = _without_noise(covariance(batch, outputs, advantage))  # (n,)
        least = cov.topk(max(int(self.share * len(cov)), 1)).values[-1]  # all tokens with cov >= least are penalized
        return self.coefficient * (cov >= least).double()


class OffPolicyMask(Component):
    """Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556, equation 9).

    A is the advantage of a token, mu the sampler's policy, and pi the policy in the current minibatch. The token is
    masked if A < 0 and the mean of log(mu / pi) over the trajectory is above ``threshold``.
    """

    threshold: float = Field(default=0.5, gt=0)
    """Limit of the mean of log(mu / pi) over a trajectory, with the sampler's policy mu and the current policy pi. If
    the mean is above the limit, all tokens with a negative advantage are masked in this trajectory."""

    @property
    def formula(self) -> str:
        return f"without tokens with A < 0 of trajectories whose mean of log(mu / pi) is above {self.threshold:g}"

    def kept(self, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return for each of the n tokens of a micro-batch whether the token has a policy loss: (n,) bool.

        The micro-batch must hold whole trajectories. ``advantage`` (n,) holds the advantages of the tokens.
        """
        sampler_logprobs = require(tokens.sampler_logprobs, "the sampler's log-probabilities")
        trajectory = require(tokens.trajectory, "the trajectory of each token")
        moved = segment_mean(sampler_logprobs - tokens.logprobs.detach(), trajectory)[trajectory]  # (n,)
        return (advantage >= 0) | (moved <= self.threshold)


def covariance(batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
    """Return the contribution of each of n tokens to the covariance of advantage A and log-probability: (n,).

    log pi_old is the log-probability under the policy before the update. If this log-probability was not computed, the
    sampler's log-probability replaces it. The means are over the n tokens:

        cov = (A - mean A) (log pi_old - mean log pi_old)
    """
    logprobs = batch.sampler_logprobs if outputs.old_logprobs is None else outputs.old_logprobs  # (n,)
    return (advantage - advantage.mean()) * (logprobs - logprobs.mean())


def _without_noise(x: Tensor) -> Tensor:
    """Return ``x``, rounded to 9 decimals, so that rounding errors do not decide comparisons."""
    return x.round(decimals=9)
