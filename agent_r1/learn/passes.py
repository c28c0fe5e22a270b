"""Passes of the models over a batch: what they say of its action tokens, with and without gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.learn.batch import Batch
from agent_r1.learn.microbatches import MicroBatch, micro_batches
from agent_r1.learn.row import Credit, Metrics, Row, TokenView
from agent_r1.learn.sequences import TokenSequence
from agent_r1.model.forward import hidden_states, token_scores
from agent_r1.model.value import ValueModel


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """What is asked about a batch: the policy at the sampler's temperature, and a critic where there is one."""

    policy: PreTrainedModel
    critic: ValueModel | None
    temperature: float
    micro_tokens: int

    def cut(self, sequences: Sequence[TokenSequence]) -> Iterator[MicroBatch]:
        """The sequences in micro-batches, where the models are."""
        return (micro.to(self.policy.device) for micro in micro_batches(sequences, self.micro_tokens))

    def scores(self, batch: Batch, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (n,) of the micro-batch's action tokens; the head is applied to these only."""
        hidden = hidden_states(self.policy, micro.ids, micro.positions, micro.mask).flatten(0, 1)
        targets = batch.ids[micro.tokens].to(hidden.device)
        return token_scores(self.policy, hidden[micro.predictors], targets, self.temperature)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """(N,) float64 on the CPU: the policy's log-probability of each action token."""
        found = torch.empty(len(batch.ids), dtype=torch.float64)
        for micro in self.cut(batch.sequences):
            found[micro.tokens] = self.scores(batch, micro)[0].double().cpu()
        return found

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor | None:
        """(N,) float64 on the CPU: the critic's value of the state before each action token; None without a critic."""
        if self.critic is None:
            return None
        found = torch.empty(len(batch.ids), dtype=torch.float64)
        for micro in self.cut(batch.sequences):
            found[micro.tokens] = _values(self.critic, micro).double().cpu()
        return found


def _values(critic: ValueModel, micro: MicroBatch) -> Tensor:
    return critic(micro.ids, micro.positions, micro.mask).flatten()[micro.predictors]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A batch with its credit, and what the models said before the update, (N,) each.

    ``old`` is None where there will be one pass only: it is then its own old policy.
    """

    batch: Batch
    credit: Credit
    values: Tensor | None
    old: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What a pass saw of n action tokens, without gradient.

    ``tokens`` are their places in the batch, ``ratios`` pi / pi_old; ``real`` of ``padded`` tokens
    that the model read were not padding.
    """

    loss: Tensor
    metrics: Metrics
    tokens: Tensor
    logprobs: Tensor
    ratios: Tensor
    entropy: Tensor
    real: int
    padded: int


def learn(models: Models, row: Row, prepared: Prepared, sequences: Sequence[TokenSequence], weight: float) -> Pass:
    """Add the gradient of ``weight`` times the loss of these sequences (at least one) to the models' gradients."""
    return _joined([_learn(models, row, prepared, micro, weight) for micro in models.cut(sequences)])


def _learn(models: Models, row: Row, prepared: Prepared, micro: MicroBatch, weight: float) -> Pass:
    logprobs, entropy = models.scores(prepared.batch, micro)
    view = TokenView(
        logprobs=logprobs,
        old=logprobs.detach() if prepared.old is None else _at(prepared.old, micro, logprobs),
        values=None if models.critic is None else _values(models.critic, micro),
        old_values=None if prepared.values is None else _at(prepared.values, micro, logprobs),
    )
    loss, metrics = row.loss(view, _credit_at(prepared.credit, micro, weight, logprobs))
    loss.backward()
    return Pass(
        loss=loss.detach(),
        metrics=metrics,
        tokens=micro.tokens,
        logprobs=logprobs.detach(),
        ratios=(logprobs.detach() - view.old).exp(),
        entropy=entropy,
        real=micro.real,
        padded=micro.ids.numel(),
    )


def _credit_at(credit: Credit, micro: MicroBatch, weight: float, like: Tensor) -> Credit:
    return Credit(
        advantage=_at(credit.advantage, micro, like),
        weight=weight * _at(credit.weight, micro, like),
        value_target=None if credit.value_target is None else _at(credit.value_target, micro, like),
    )


def _at(x: Tensor, micro: MicroBatch, like: Tensor) -> Tensor:
    """The entries of (N,) for the tokens of a micro-batch, where and as what ``like`` is."""
    return x[micro.tokens].to(like)


def _joined(parts: Sequence[Pass]) -> Pass:
    return Pass(
        loss=torch.stack([part.loss for part in parts]).sum(),
        metrics={name: torch.stack([part.metrics[name] for part in parts]).sum() for name in parts[0].metrics},
        tokens=torch.cat([part.tokens for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        ratios=torch.cat([part.ratios for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        real=sum(part.real for part in parts),
        padded=sum(part.padded for part in parts),
    )
