"""Rules that treat some tokens differently: token masks, the off-policy sequence mask, and KL-Cov.

A masked token has no policy loss, but it counts in the denominators and in the other terms of the loss. Rules that
compare the tokens of a batch use the policy before the update, so that they depend neither on minibatches nor on
micro-batches.
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
    """A rule that chooses the tokens of the policy loss, among the n tokens of the loss mask."""

    name: str = ""

    compares_sampler: ClassVar[bool] = False
    """Whether pi_old and the sampler are compared, which takes a forward pass before the update."""
    needs_entropy: ClassVar[bool] = False
    """Whether the entropy of pi_old at each token is needed, which takes a forward pass before the update."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The rule in words, with the values of its settings."""

    @abstractmethod
    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        """Return which of the n tokens have a policy loss: (n,) bool.

        Args:
            batch: the n tokens; its columns of tokens are (n,).
            outputs: Model outputs for these tokens, before the update.
            advantage: (n,) their advantages.
        """


class SecondMoment(TokenMask):
    """Keep the tokens of smallest (log(pi_old / mu))^2 whose mean is at most ``threshold``: M2PO (2510.01161).

    The tokens that moved furthest from the sampler are masked, until the second moment of the log-ratio is within the
    threshold (``_apply_m2po_masking`` in AReaL). Unlike a clip, it bounds the batch and not each token.
    """

    name: Literal["second_moment"] = "second_moment"
    compares_sampler: ClassVar[bool] = True

    threshold: float = Field(default=0.04, gt=0)
    """Largest mean of the squared log-ratio."""

    @property
    def formula(self) -> str:
        return f"without the tokens of largest (log(pi_old / mu))^2, until its mean is at most {self.threshold:g}"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        old_logprobs = require(outputs.old_logprobs, "log-probabilities before the update")
        squares = _without_noise((old_logprobs - batch.sampler_logprobs).square())  # (n,)
        ordered = squares.sort().values
        # the means of the 1, 2, .. n smallest squares do not decrease; equal squares are kept or masked together
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)  # (n,)
        first_masked = torch.searchsorted(ordered, ordered[means > self.threshold][:1])  # (1,), or (0,) if all are kept
        return squares < ordered[first_masked] if len(first_masked) else torch.ones_like(squares, dtype=torch.bool)


class TopEntropy(TokenMask):
    """Keep the share of tokens at which the policy's entropy is largest: the forking tokens of 2506.01939.

    It is the quantile of ``top_entropy_quantile`` in TRL, over the whole batch.
    """

    name: Literal["top_entropy"] = "top_entropy"
    needs_entropy: ClassVar[bool] = True

    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the tokens that is kept."""

    @property
    def formula(self) -> str:
        return f"only at the {self.share:g} of tokens with the largest entropy of pi_old"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        entropy = _without_noise(require(outputs.entropy, "the entropy of the policy"))  # (n,)
        # the first token above the quantile 1 - share; 1e-9 against rounding of whole numbers
        rank = math.ceil((1 - self.share) * (len(entropy) - 1) - 1e-9)
        return entropy >= entropy.sort().values[rank]


class ClipCov(TokenMask):
    """Mask a few random tokens with a large covariance of advantage and log-probability: Clip-Cov (2505.22617).

    These tokens reduce the entropy of the policy most. A ``share`` of all tokens, and at least one, is drawn from those
    with low < cov < high; see :func:`covariance`.
    """

    name: Literal["clip_cov"] = "clip_cov"

    share: float = Field(default=2e-4, gt=0, lt=1)
    """Largest share of the tokens that is masked."""

    low: float = 1.0
    """Covariance above which a token may be masked."""

    high: float = 5.0
    """Covariance below which a token may be masked."""

    @property
    def formula(self) -> str:
        return f"without {self.share:g} of the tokens, drawn from those with {self.low:g} < cov < {self.high:g}"

    def kept(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        cov = covariance(batch, outputs, advantage)  # (n,)
        candidates = ((cov > self.low) & (cov < self.high)).nonzero().squeeze(1)
        # each token's number in the draw depends on its attempt and place alone: a repeated or resumed run draws alike
        place = index_within(batch.token_trajectory)[candidates].tolist()
        attempts = [batch.attempts[number] for number in batch.token_trajectory[candidates].tolist()]
        lots = torch.tensor([attempt.seed(0, index) for attempt, index in zip(attempts, place, strict=True)])
        drawn = lots.argsort()[: max(int(self.share * len(cov)), 1)]
        return torch.ones(len(cov), dtype=torch.bool).index_fill(0, candidates[drawn], False)


class KlCov(Component):
    """A penalty |log(pi / pi_old)| on the tokens of largest covariance, in place of a mask: KL-Cov (2505.22617)."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens that is penalized, at least one token."""

    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""

    @property
    def formula(self) -> str:
        """The penalty in words, with the values of its settings."""
        return f"less {self.coefficient:g} |log(pi / pi_old)| at the {self.share:g} of tokens with the largest cov"

    def weight(self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
        """Return the weight of the penalty at each of n tokens, of whole batches: (n,)."""
        cov = _without_noise(covariance(batch, outputs, advantage))  # (n,)
        least = cov.topk(max(int(self.share * len(cov)), 1)).values[-1]  # tokens equal to it are penalized too
        return self.coefficient * (cov >= least).double()


class OffPolicyMask(Component):
    """Off-policy sequence masking of DeepSeek-V3.2 (2512.02556, equation 9).

        M = 0 if A < 0 and the mean of log(mu / pi) over the trajectory > threshold, else 1

    pi is the present policy, so the mask sees staleness, the mismatch of sampler and trainer, and earlier minibatches.
    """

    threshold: float = Field(default=0.5, gt=0)
    """Largest mean of log(mu / pi) over a trajectory at which bad actions are still trained on."""

    @property
    def formula(self) -> str:
        """The rule in words, with the values of its settings."""
        return f"without tokens with A < 0 of trajectories whose mean of log(mu / pi) is above {self.threshold:g}"

    def kept(self, advantage: Tensor, tokens: TokenOutputs) -> Tensor:
        """Return which of the n tokens of whole trajectories have a policy loss: (n,) bool."""
        sampler_logprobs = require(tokens.sampler_logprobs, "the sampler's log-probabilities")
        trajectory = require(tokens.trajectory, "the trajectory of each token")
        moved = segment_mean(sampler_logprobs - tokens.logprobs.detach(), trajectory)[trajectory]  # (n,)
        return (advantage >= 0) | (moved <= self.threshold)


def covariance(batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor) -> Tensor:
    """Return each token's part of the covariance of advantage and log-probability: (n,).

        cov = (A - mean A) (log pi_old - mean log pi_old)

    If pi_old was not computed, the sampler's log-probabilities stand for it: then both are the same policy.
    """
    logprobs = batch.sampler_logprobs if outputs.old_logprobs is None else outputs.old_logprobs  # (n,)
    return (advantage - advantage.mean()) * (logprobs - logprobs.mean())


def _without_noise(x: Tensor) -> Tensor:
    """Return x rounded, so that equal numbers stay equal in whatever micro-batches they were computed."""
    return x.round(decimals=9)
