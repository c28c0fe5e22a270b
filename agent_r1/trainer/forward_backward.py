"""Models over a batch: what they say of its tokens, with and without gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.signals import TokenWeights, CriticView, Metrics, ModelOutputs, TokenOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import MicroBatch, by_sequence, by_trajectory, micro_batches
from agent_r1.data.segments import renumbered
from agent_r1.data.sequences import TokenSequence
from agent_r1.model.forward import hidden_states, token_scores
from agent_r1.model.value_head import ValueModel

POLICY, CRITIC = "policy", "critic"
MODULES = (POLICY, CRITIC)
"""The modules that are trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """What is asked about a batch: the policy at the sampler's temperature, and, where the algorithm needs them, a
    critic, the policy as it began, a teacher."""

    policy: PreTrainedModel
    temperature: float
    micro_tokens: int
    critic: ValueModel | None = None
    reference: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None

    def cut(self, sequences: Sequence[TokenSequence], row: Algorithm) -> Iterator[MicroBatch]:
        """The sequences in micro-batches, where the models are; trajectories stay whole where the ratio is theirs."""
        return self._placed(micro_batches(blocks_of(sequences, row), self.micro_tokens))

    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """(N,) float64 on the CPU: the policy's log-probability of each token."""
        return self._logprobs(self.policy, batch)

    def signals(self, batch: TrainingBatch) -> ModelOutputs:
        """What all but the policy say of a batch."""
        values, ends = self._values(batch)
        return ModelOutputs(
            values=values,
            ends=ends,
            reference=None if self.reference is None else self._logprobs(self.reference, batch),
            teacher=None if self.teacher is None else self._logprobs(self.teacher, batch),
        )

    @torch.no_grad()
    def _logprobs(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        found = torch.empty(len(batch.ids), dtype=torch.float64)
        for micro in self._placed(micro_batches(by_sequence(batch.sequences), self.micro_tokens)):
            found[micro.tokens] = scores(model, batch, micro, self.temperature)[0].double().cpu()
        return found

    @torch.no_grad()
    def _values(self, batch: TrainingBatch) -> tuple[Tensor | None, Tensor | None]:
        """(N,) before each token and (S,) after each turn's action, float64 on the CPU; None without a critic."""
        if self.critic is None:
            return None, None
        values = torch.empty(len(batch.ids), dtype=torch.float64)
        ends = torch.empty(len(batch.turn_trajectory), dtype=torch.float64)
        for micro in self._placed(micro_batches(by_sequence(batch.sequences), self.micro_tokens)):
            everywhere = _critic(self.critic, micro).double().cpu()
            values[micro.tokens] = everywhere[micro.predictors.cpu()]
            ends[micro.turns] = everywhere[micro.ends.cpu()]
        return values, ends

    def _placed(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return (micro.to(self.policy.device) for micro in micros)


def blocks_of(sequences: Sequence[TokenSequence], row: Algorithm) -> list[tuple[TokenSequence, ...]]:
    """What must be learned from in one pass."""
    return by_trajectory(sequences) if row.ratio == "trajectory" else by_sequence(sequences)


def scores(
    model: PreTrainedModel, batch: TrainingBatch, micro: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (n,) of the micro-batch's tokens; the head is applied to these only."""
    hidden = hidden_states(model, micro.ids, micro.positions, micro.mask).flatten(0, 1)
    targets = batch.ids[micro.tokens].to(hidden.device)
    return token_scores(model, hidden[micro.predictors], targets, temperature, entropy_gradient=entropy_gradient)


def _critic(critic: ValueModel, micro: MicroBatch) -> Tensor:
    return critic(micro.ids, micro.positions, micro.mask).flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A batch with its credit, and what the models said before the update.

    ``old`` (N,) is what ratios compare with; None where there will be one pass only: it is then its own old policy.
    """

    batch: TrainingBatch
    credit: TokenWeights
    signals: ModelOutputs
    old: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What a pass saw of n tokens, without gradient.

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


def learn(
    models: Models,
    row: Algorithm,
    prepared: Prepared,
    sequences: Sequence[TokenSequence],
    weight: float,
    moving: Collection[str] = MODULES,
) -> Pass:
    """Add the gradient of ``weight`` times the loss of these sequences (at least one) to those of the models moving."""
    return _joined([_learn(models, row, prepared, micro, weight, moving) for micro in models.cut(sequences, row)])


def _learn(
    models: Models, row: Algorithm, prepared: Prepared, micro: MicroBatch, weight: float, moving: Collection[str]
) -> Pass:
    with torch.set_grad_enabled(POLICY in moving):
        logprobs, entropy = scores(models.policy, prepared.batch, micro, models.temperature, row.entropy > 0)
    view = _view(models, prepared, micro, logprobs, entropy)
    loss, metrics = row.loss(view, _credit_at(prepared.credit, micro, weight, logprobs))
    loss.backward()
    return Pass(
        loss=loss.detach(),
        metrics=metrics,
        tokens=micro.tokens,
        logprobs=logprobs.detach(),
        ratios=(logprobs.detach() - view.old).exp(),
        entropy=entropy.detach(),
        real=micro.real,
        padded=micro.ids.numel(),
    )


def _view(models: Models, prepared: Prepared, micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenOutputs:
    batch, signals, now = prepared.batch, prepared.signals, logprobs.detach()
    turn, trajectory = batch.token_turn[micro.tokens], batch.token_trajectory[micro.tokens]
    chosen = batch.chosen[micro.tokens]
    old = now
    if prepared.old is not None:  # what nobody chose is its own old policy
        old = torch.where(chosen.to(now.device), _at(prepared.old, micro.tokens, now), now)
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        old=old,
        turn=renumbered(turn, chosen).to(now.device),
        trajectory=renumbered(trajectory, chosen).to(now.device),
        reference=None if signals.reference is None else _at(signals.reference, micro.tokens, now),
        critic=_critic_view(models.critic, signals, micro, now),
    )


def _critic_view(critic: ValueModel | None, signals: ModelOutputs, micro: MicroBatch, like: Tensor) -> CriticView | None:
    if critic is None or signals.values is None or signals.ends is None:
        return None
    everywhere = _critic(critic, micro)
    return CriticView(
        values=everywhere[micro.predictors],
        ends=everywhere[micro.ends],
        old_values=_at(signals.values, micro.tokens, like),
        old_ends=_at(signals.ends, micro.turns, like),
    )


def _credit_at(credit: TokenWeights, micro: MicroBatch, weight: float, like: Tensor) -> TokenWeights:
    targets = credit.targets
    return TokenWeights(
        advantage=_at(credit.advantage, micro.tokens, like),
        share=weight * _at(credit.share, micro.tokens, like),
        trust=_at(credit.trust, micro.tokens, like),
        imitation=None if credit.imitation is None else weight * _at(credit.imitation, micro.tokens, like),
        targets=None
        if targets is None
        else replace(
            targets,
            tokens=_at(targets.tokens, micro.tokens, like),
            token_shares=weight * _at(targets.token_shares, micro.tokens, like),
            ends=_at(targets.ends, micro.turns, like),
            end_shares=weight * _at(targets.end_shares, micro.turns, like),
        ),
        kl_coefficient=credit.kl_coefficient,
    )


def _at(x: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """The entries of a column for the tokens or turns of a micro-batch, where and as what ``like`` is."""
    return x[places].to(like)


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
