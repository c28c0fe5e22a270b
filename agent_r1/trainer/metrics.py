"""What an update reports of itself, as numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from agent_r1.data.batch import TrainingBatch
from agent_r1.data.training_sample import Selection
from agent_r1.trainer.forward_backward import Pass, Prepared


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One optimizer step: which trajectories of the batch it used, what its pass saw, and the gradient norms.

    ``norms`` (by module, before clipping) is None where the step was refused because something was not finite.
    """

    trajectories: frozenset[int]
    seen: Pass
    norms: Mapping[str, float] | None

    @property
    def applied(self) -> bool:
        return self.norms is not None


def reward_metrics(admission: Selection, useful: Selection) -> dict[str, float]:
    """``failed``: attempts that could not be learned from; ``filtered``: those the algorithm sets aside.

    ``reward``: mean over all attempts that could be scored, also those that teach nothing; NaN without any."""
    totals = [sample.total for sample in admission.samples]
    failed = len(admission.left_out)
    counts = {"failed": float(failed), "filtered": float(len(useful.left_out) - failed)}
    return {"reward": fmean(totals) if totals else math.nan, **counts}


def pass_metrics(prepared: Prepared, steps: Sequence[Step], version: int) -> dict[str, float]:
    """What the passes over a batch saw.

    ``first_ratio_deviation``: largest |pi / pi_old - 1| before any weight moved. ``logprob_gap``:
    largest difference to what the sampler recorded, then; of a stale batch it holds the staleness too.
    ``staleness``: updates since the oldest token.
    """
    batch, chosen = prepared.batch, prepared.batch.chosen
    passes = [step.seen for step in steps]
    entropy = _by_token(batch.ids, [(one.tokens, one.entropy) for one in passes])
    return {
        "entropy": float(entropy[chosen].mean()),
        "advantage_std": float(prepared.credit.advantage[chosen].std(correction=0)),
        "first_ratio_deviation": float((passes[0].ratios - 1).abs().max()),
        "logprob_gap": _logprob_gap(prepared, passes[0]),
        "staleness": float(version - int(batch.versions.min())),
        "action_tokens": float(chosen.sum()),
        "model_tokens": float(sum(map(len, batch.sequences))),
        "padding": 1 - sum(one.real for one in passes) / sum(one.padded for one in passes),
        "skipped_steps": float(sum(not step.applied for step in steps)),
        **_signal_metrics(prepared),
        **_step_metrics([step for step in steps if step.applied]),
    }


def _logprob_gap(prepared: Prepared, first: Pass) -> float:
    """Of all tokens where the policy was asked beforehand, else of those of the first pass: later ones see other
    weights."""
    batch, asked = prepared.batch, prepared.signals.old
    tokens = torch.arange(len(batch.ids)) if asked is not None else first.tokens
    before = asked if asked is not None else first.logprobs.double().cpu()
    return float((before - batch.sampler_logprobs[tokens])[batch.chosen[tokens]].abs().max())


def _signal_metrics(prepared: Prepared) -> dict[str, float]:
    """What there is to tell where an algorithm asks other models, or compares sampler and trainer.

    ``kl_reference``: estimate (k1) of the divergence from the reference, per token. ``explained_variance``: 1 where
    the critic knew its targets, 0 where a constant would have done as well. ``trust``: mean factor on the loss.
    """
    batch, signals, credit = prepared.batch, prepared.signals, prepared.credit
    metrics: dict[str, float] = {}
    if signals.reference is not None:
        metrics["kl_reference"] = kl_reference(batch, signals.reference)
        metrics["kl_coefficient"] = signals.kl_coefficient
    if credit.targets is not None and signals.values is not None:
        counted = credit.targets.token_shares > 0
        target, said = credit.targets.tokens[counted], signals.values[counted]
        spread = float(target.var(correction=0))
        metrics["explained_variance"] = 1 - float((target - said).var(correction=0)) / spread if spread else 0.0
    if bool((credit.trust != 1).any()):
        metrics["trust"] = float(credit.trust[batch.chosen].mean())
    return metrics


def kl_reference(batch: TrainingBatch, reference: Tensor) -> float:
    """Mean over action tokens of log(mu / reference): k1."""
    return float((batch.sampler_logprobs - reference)[batch.chosen].mean())


def _by_token(like: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """(N,) float64: the parts in the batch's order; of a token seen more than once, the first pass's."""
    found = torch.empty(len(like), dtype=torch.float64)
    for tokens, values in reversed(parts):
        found[tokens] = values.double().cpu()
    return found


def _step_metrics(steps: Sequence[Step]) -> dict[str, float]:
    """The row's own metrics and the gradient norms, averaged over the optimizer steps that were applied."""
    metrics: dict[str, list[float]] = {}
    for step in steps:
        norms = {f"{module}_gradient_norm": norm for module, norm in (step.norms or {}).items()}
        shares = {name: float(value) for name, value in step.seen.metrics.items()}
        for name, value in {**shares, **norms}.items():
            metrics.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in metrics.items()}
