"""The report of an update: metrics, the outcome of each attempt, and token records of some attempts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import MIN_STD, effective_share
from agent_r1.core.events import TokenRecord
from agent_r1.core.trajectory import STATUS_POLICY, AttemptId, Group
from agent_r1.data.batch import TrainingBatch, segment_sum
from agent_r1.data.training_sample import Excluded, Selection, TrainingSample, describe_status
from agent_r1.trainer.protocol import POLICY, Module, OptimStats, PassStats, PreparedBatch

NOT_FINITE = "the loss or a gradient was not finite"
NO_ADVANTAGE = "advantage 0 on every token"
GREEDY = "greedy attempt, to compare with"
REJECTED = "rejected: sampler and trainer disagree"
MASKED = "no token has a policy loss: all are masked or rejected"


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """The data of one optimizer step. ``trajectories`` holds the indices of the trajectories that the step used."""

    modules: frozenset[Module]
    trajectories: frozenset[int]
    passed: PassStats
    optim: OptimStats


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of an attempt that was used for training.

    ``advantage_sum`` is the sum of the advantages of the attempt's tokens.
    """

    attempt: AttemptId
    advantage_sum: float


Outcome = Trained | Excluded
"""What an update did with an attempt: the attempt was used for training, or excluded for a reason."""


def reward_metrics(selection: Selection, kept: Selection) -> dict[str, float]:
    """Return metrics of rewards and of excluded attempts. ``kept`` is ``selection`` after the filters of the algorithm.

    - ``reward``: mean reward of the trainable attempts, including filtered attempts; NaN if no attempt is trainable.
    - ``reward_spread``: standard deviation of the rewards within a group, averaged over the groups.
    - ``constant_groups``: share of the groups in which all rewards are equal.
    - ``failed``: number of attempts that cannot be used for training.
    - ``filtered``: number of trainable attempts that the algorithm's filters excluded.

    ``reward_spread`` and ``constant_groups`` leave out groups with fewer than two trainable attempts. If no group
    remains, both metrics are NaN.
    """
    rewards = [sample.total for sample in selection.samples]
    failed = len(selection.excluded)
    groups: dict[int, list[float]] = {}
    for sample in selection.samples:
        groups.setdefault(sample.group, []).append(sample.total)
    spreads = [pstdev(group) for group in groups.values() if len(group) > 1]
    return {
        "reward": fmean(rewards) if rewards else math.nan,
        "reward_spread": fmean(spreads) if spreads else math.nan,
        "constant_groups": fmean(spread <= MIN_STD for spread in spreads) if spreads else math.nan,
        "failed": float(failed),
        "filtered": float(len(kept.excluded) - failed),
    }


def pass_metrics(
    prepared: PreparedBatch, steps: Sequence[OptimizerStep], version: int, algorithm: Algorithm
) -> dict[str, float]:
    """Return the metrics of the optimizer steps over a batch.

    ``version`` is the version of the policy's weights before the steps. Some of the metrics are:

    - ``staleness``: ``version`` minus the version of the oldest weights that sampled a token of the batch.
    - ``model_tokens``: number of tokens that the models read in the first epoch, without padding. A shared prefix
      counts once.
    - ``padding``: share of padding among the tokens that the models read.
    - ``skipped_steps``: number of steps in which the loss or a gradient was not finite.
    - ``policy_loss``, other terms of the loss, and ``policy_gradient_norm``: means over the applied steps.

    The next metrics are missing if the steps trained only the critic:

    - ``entropy``: mean entropy, in nats, over the action tokens that the policy read.
    - ``first_ratio_deviation``: largest |ratio - 1| of a token before any weight changes. The ratio is the importance
      ratio pi / pi_old.
    - ``logprob_gap``: largest absolute difference between trainer and sampler in the log-probability of an action
      token, before any weight changes. If older weights sampled a token, the difference includes the change of the
      policy since then.
    - ``logprob_gap_mean``: mean of the same absolute differences.
    """
    batch, actions = prepared.batch, prepared.batch.action_mask
    passes = [step.passed for step in steps]
    model_tokens, seen = 0, set[int]()
    for step in steps:
        if not seen.isdisjoint(step.trajectories):
            break  # the first epoch ends before the first step that uses a trajectory for the second time
        seen |= step.trajectories
        model_tokens += step.passed.num_tokens
    metrics = {
        "advantage_std": float(prepared.weights.advantage[actions].std(correction=0)),
        "staleness": float(version - int(batch.versions.min())),
        "action_tokens": float(actions.sum()),
        "model_tokens": float(model_tokens),
        "padding": 1 - sum(one.num_tokens for one in passes) / sum(one.num_padded_tokens for one in passes),
        "skipped_steps": float(sum(not step.optim.applied for step in steps)),
    }
    if of_policy := [one for one in passes if len(one.tokens)]:
        tokens, logprobs = logprobs_before_update(prepared, of_policy[0])
        gap = (logprobs - batch.sampler_logprobs[tokens])[actions[tokens]]
        metrics |= {
            "entropy": float(first_entropies(prepared, of_policy)[actions].nanmean()),
            "first_ratio_deviation": float((of_policy[0].ratios - 1).abs().max()),
            "logprob_gap": float(gap.abs().max()),
            "logprob_gap_mean": float(gap.abs().mean()),
        }
    by_step: dict[str, list[float]] = {}  # terms of the loss and norms of gradients: one number per applied step
    for step in steps:
        if step.optim.applied:
            terms = {name: float(value) for name, value in step.passed.metrics.items()}
            norms = {f"{module}_gradient_norm": norm for module, norm in step.optim.gradient_norms.items()}
            for name, value in {**terms, **norms}.items():
                by_step.setdefault(name, []).append(value)
    means = {name: fmean(numbers) for name, numbers in by_step.items()}
    return {**metrics, **_model_metrics(prepared, algorithm), **means}


def first_entropies(prepared: PreparedBatch, passes: Sequence[PassStats]) -> Tensor:
    """Return the policy's entropy at each of the batch's N tokens: (N,).

    If several passes read a token, the entropy is from the first of these passes. If no pass read a token, the entropy
    is NaN.
    """
    entropy = torch.full((len(prepared.batch.ids),), math.nan, dtype=torch.float64)
    for one in reversed(passes):
        entropy[one.tokens] = one.entropy.double()
    return entropy


def logprobs_before_update(prepared: PreparedBatch, first: PassStats) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of tokens of the batch under the policy before the update.

    If an extra pass read the batch before the update, the result contains all tokens of the batch. Otherwise, the
    result contains the tokens of ``first``, the first pass of the update.
    """
    old = prepared.outputs.old_logprobs
    return (first.tokens, first.logprobs.double()) if old is None else (torch.arange(len(prepared.batch.ids)), old)


def _model_metrics(prepared: PreparedBatch, algorithm: Algorithm) -> dict[str, float]:
    batch, outputs, weights = prepared.batch, prepared.outputs, prepared.weights
    metrics: dict[str, float] = {}
    if outputs.reference_logprobs is not None:
        metrics["kl_reference"] = kl_reference(batch, outputs.reference_logprobs)
        metrics["kl_coefficient"] = weights.kl_coef
    if weights.value_targets is not None and outputs.values is not None:
        known = weights.value_targets.weight.before_token > 0  # tokens whose return is known
        target, value = weights.value_targets.target.before_token[known], outputs.values.before_token[known]
        variance, unexplained = float(target.var(correction=0)), float((target - value).var(correction=0))
        if variance > 0:
            metrics["critic/explained_variance"] = 1 - unexplained / variance
    if outputs.teacher_top is not None:
        mass = outputs.teacher_top.logprobs.exp().sum(-1)  # (N,)
        metrics["teacher_top_mass"] = float(mass[batch.action_mask].mean())
    if algorithm.correction is not None and outputs.old_logprobs is not None:
        correction = algorithm.correction_weights(batch, outputs.old_logprobs)  # (N,)
        metrics["correction/effective_share"] = effective_share(correction[batch.action_mask])
    if bool((weights.importance_weight != 1).any()):
        metrics["importance_weight"] = float(weights.importance_weight[batch.action_mask].mean())
    return metrics


def kl_reference(batch: TrainingBatch, reference: Tensor) -> float:
    """Return the KL divergence of the sampler's policy from the reference policy: the mean over the action tokens.

    The k1 estimate is used: log(probability under the sampler / probability under the reference).
    ``reference`` (N,) holds the log-probabilities of the batch's N tokens under the reference policy.
    """
    return float((batch.sampler_logprobs - reference)[batch.action_mask].mean())


def batch_outcomes(prepared: PreparedBatch, steps: Sequence[OptimizerStep], without_loss: str) -> list[Outcome]:
    """Return the outcome of each attempt of the batch: ``Trained``, or ``Excluded`` with a reason.

    An attempt is ``Trained`` if two conditions hold:

    - At least one token of the attempt has a policy loss.
    - At least one optimizer step with the attempt was applied, and not skipped. Steps of the critic are ignored, unless
      ``steps`` has no steps of the policy.

    ``without_loss`` is the reason for an attempt without policy loss, unless ``loss_excluded`` of the batch holds a
    reason for the attempt.
    """
    batch, weights = prepared.batch, prepared.weights
    steps = [step for step in steps if POLICY in step.modules] or steps
    used = frozenset[int]().union(*(step.trajectories for step in steps))
    trained = frozenset[int]().union(*(step.trajectories for step in steps if step.optim.applied))
    accepted = segment_sum(weights.importance_weight * batch.action_mask, batch.token_trajectory).tolist()  # (M,)
    advantage_sum = segment_sum(weights.advantage, batch.token_trajectory).tolist()  # (M,)
    outcomes: list[Outcome] = []
    for number, attempt in enumerate(batch.attempts):
        reason = batch.loss_excluded[number]
        if reason is not None:
            outcomes.append(Excluded(attempt, reason))
        elif not accepted[number]:
            outcomes.append(Excluded(attempt, without_loss))
        elif number in trained:
            outcomes.append(Trained(attempt, advantage_sum[number]))
        else:
            outcomes.append(Excluded(attempt, NOT_FINITE if number in used else NO_ADVANTAGE))
    return outcomes


def untrained_outcomes(groups: Sequence[Group]) -> list[Excluded]:
    """Return the outcomes of greedy attempts, and of failed attempts that were replaced by a new attempt."""
    outcomes = []
    for greedy in (group.greedy for group in groups if group.greedy is not None):
        failed = STATUS_POLICY[greedy.status] != "train"
        outcomes.append(Excluded(greedy.attempt, f"{GREEDY}; {describe_status(greedy)}" if failed else GREEDY))
    for retried in (trajectory for group in groups for trajectory in group.retried):
        outcomes.append(Excluded(retried.attempt, f"tried again after {describe_status(retried)}"))
    return outcomes


def make_token_records(
    samples: Sequence[TrainingSample], prepared: PreparedBatch, steps: Sequence[OptimizerStep], groups: int
) -> tuple[TokenRecord, ...]:
    """Return the records of the action tokens in the first groups that the optimizer steps used.

    There is one record for each turn with action tokens. The record holds, for example, the log-probability and the
    advantage of each action token.

    Args:
        samples: one sample for each trajectory of the batch, in the order of the batch.
        groups: the maximum number of groups with records.
    """
    if not groups:
        return ()
    batch = prepared.batch
    used = set[int]().union(*(step.trajectories for step in steps))
    chosen = sorted({samples[number].group for number in used})[:groups]
    weights, values = prepared.weights, prepared.outputs.values
    passes = [step.passed for step in steps if len(step.passed.tokens)]  # passes that ran the policy
    logprobs = torch.full_like(weights.advantage, math.nan)  # (N,)
    if passes:
        tokens, known = logprobs_before_update(prepared, passes[0])
        logprobs[tokens] = known
    rows = [logprobs, weights.advantage, weights.loss_weight * weights.importance_weight]
    rows += [first_entropies(prepared, passes), *([] if values is None else [values.before_token])]
    columns = torch.stack(rows)  # (4, N), or (5, N) with a critic: the numbers of each token
    records: list[TokenRecord] = []
    for number, sample in enumerate(samples):
        if sample.group not in chosen:
            continue
        own = (batch.token_trajectory == number) & batch.action_mask  # (N,)
        turns = [turn for turn in sample.trajectory.turns if turn.action_ids]
        parts = columns[:, own].split([len(turn.action_ids) for turn in turns], dim=1)
        for turn, part in zip(turns, parts, strict=True):
            records.append(TokenRecord(sample.trajectory.attempt, turn.index, *map(tuple, part.tolist())))
    return tuple(records)
