"""The policy update: it changes the weights, and reports which attempts were trained or excluded."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from types import MappingProxyType

import torch
from torch import Tensor

from agent_r1.algorithms.advantages.returns import AgainstRole
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import MIN_STD, RETURN_TOLERANCE, effective_share
from agent_r1.algorithms.types import ModelOutputs, TokenWeights
from agent_r1.algorithms.validation import check_algorithm
from agent_r1.core.events import TokenRecord
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.core.profile import measure
from agent_r1.core.threads import WorkerThread
from agent_r1.core.trajectory import STATUS_POLICY, AttemptId, Group, RewardSchedule
from agent_r1.data.batch import (
    Excluded,
    Selection,
    TrainingBatch,
    TrainingSample,
    assemble_batch,
    describe_status,
    segment_count,
    segment_sum,
    select_trainable,
)
from agent_r1.data.sequences import Packing, pack_causal, pack_prefix_tree, with_length_limit
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import explain_oom
from agent_r1.trainer.optimizer import learning_rate_schedule
from agent_r1.trainer.protocol import (
    CRITIC,
    POLICY,
    Module,
    OptimStats,
    PassStats,
    PreparedBatch,
    TrainerBackend,
    TrainerState,
)

NOT_FINITE = "the loss or a gradient was not finite"
NO_ADVANTAGE = "no token has an advantage"
GREEDY = "greedy attempt, to compare with"
REJECTED = "rejected: sampler and trainer disagree"
MASKED = "no token has a policy loss: all are masked or rejected"

NO_SCHEDULES: Mapping[str, RewardSchedule] = MappingProxyType({})

ROLE_BASELINE = "role_baseline/"
"""Prefix of names in ``TrainerState.scalars``: "role_baseline/buyer" is the baseline of the role "buyer" of a game."""


def weights_at(weights: Mapping[str, float], schedules: Mapping[str, RewardSchedule], step: int) -> dict[str, float]:
    """Return the weight of each reward at ``step``, multiplied by the factor of its schedule if there is one."""
    return {**weights, **{name: weights.get(name, 1.0) * one.factor(step) for name, one in schedules.items()}}


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    modules: frozenset[Module]
    trajectories: frozenset[int]  # indices of the trajectories that the step used
    passed: PassStats
    optim: OptimStats


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of an attempt that was used for training."""

    attempt: AttemptId
    advantage_sum: float  # of the attempt's tokens


Outcome = Trained | Excluded
"""What an update did with an attempt: the attempt was used for training, or excluded for a reason."""


@dataclass(frozen=True, slots=True)
class SelectedGroup:
    """A group whose attempts are divided into trainable and excluded attempts."""

    group: Group
    selection: Selection  # before the filters of the algorithm
    has_signal: bool  # whether the filters, applied to the group alone, keep at least one attempt


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one update."""

    step: int  # from 1
    version: PolicyVersion  # after the update
    metrics: Mapping[str, float]
    outcomes: tuple[Outcome, ...]  # of all attempts, also of greedy ones and of failed ones that were replaced
    micro_tokens: int  # maximum of a micro-batch, which is lowered if memory runs out
    token_records: tuple[TokenRecord, ...] = ()  # one per turn, for the first groups (setting ``record_tokens``)


class PolicyUpdater:
    """Trains a policy on groups of attempts. ``trainer`` computes the gradients and the optimizer steps.

    ``seed`` determines how trajectories are divided into minibatches. In each update, the attempts of at most
    ``record_groups`` groups get token records. ``example_coef`` is the weight of the imitation loss of examples.
    """

    def __init__(
        self,
        trainer: TrainerBackend,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        reward_weights: Mapping[str, float],
        reward_schedules: Mapping[str, RewardSchedule] = NO_SCHEDULES,
        seed: int,
        steps: int,
        record_groups: int = 0,
        example_coef: float = 0.0,
    ) -> None:
        check_algorithm(algorithm)
        self._trainer, self._algorithm, self._config = trainer, algorithm, config
        self._learning_rate_factor = learning_rate_schedule(config.schedule, steps)
        self._seed, self._record_groups, self._example_coef = seed, record_groups, example_coef
        self._reward_weights, self._reward_schedules = dict(reward_weights), dict(reward_schedules)
        self._step = self._version = 0
        self._kl_coef = 0.0 if algorithm.kl is None else algorithm.kl.coefficient
        self._role_baselines: dict[str, float] = {}
        self._published: WeightUpdate | None = None
        self._example_losses: list[float] = []
        # All updates run in one thread, because glibc keeps the freed memory of each thread for this thread alone.
        self._thread = WorkerThread("update")
        packing: Packing = pack_prefix_tree if trainer.supports_tree_attention else pack_causal
        # If the algorithm needs whole trajectories, all sequences of a trajectory share a micro-batch. Splitting a long
        # tree into paths would then only make the micro-batch larger, so no length limit applies.
        whole = algorithm.needs_whole_trajectories
        self._packing = packing if whole else with_length_limit(packing, lambda: trainer.micro_tokens)

    @property
    def needs_greedy(self) -> bool:
        """Whether the algorithm compares the attempts of a group with a greedy attempt."""
        return "greedy" in self._algorithm.needs

    @property
    def continuations(self) -> int:
        """The number of continuations from each turn that the algorithm needs."""
        return self._algorithm.advantage.continuations_per_turn

    @property
    def micro_tokens(self) -> int:
        return self._trainer.micro_tokens

    def select(self, group: Group) -> SelectedGroup:
        """Divide the attempts of a group into trainable and excluded attempts."""
        weights = weights_at(self._reward_weights, self._reward_schedules, self._step + 1)
        selection = select_trainable([group], weights)
        kept = self._algorithm.select(selection, self._version)
        return SelectedGroup(group, selection, has_signal=bool(kept.samples))

    async def update(self, groups: Sequence[SelectedGroup]) -> UpdateReport:
        """Train on ``groups``. Raise OutOfMemory if this does not fit, even in the smallest micro-batches."""
        return await self._thread.run(self._update, groups)

    def _update(self, groups: Sequence[SelectedGroup]) -> UpdateReport:
        kl = self._algorithm.kl
        attempts = sum(len(selected.group.trajectories) for selected in groups)
        with explain_oom(f"an update on {attempts} attempts, in passes of {self._trainer.micro_tokens} tokens"):
            self._step += 1
            self._published = None
            # The groups are numbered in the order of their ids, which is the order in which the run requested them.
            selections = [one.selection for one in sorted(groups, key=lambda selected: selected.group.group_id)]
            selection = Selection(
                tuple(replace(sample, group=k) for k, one in enumerate(selections) for sample in one.samples),
                tuple(excluded for one in selections for excluded in one.excluded),
            )
            kept = self._algorithm.select(selection, self._version)
            factor = self._learning_rate_factor(self._step)
            metrics = reward_metrics(selection, kept) | {"learning_rate": factor * self._config.learning_rate}
            if "critic" in self._algorithm.needs:
                metrics["critic_learning_rate"] = factor * self._config.critic_learning_rate
            records: tuple[TokenRecord, ...] = ()
            steps: list[OptimizerStep] = []
            is_changed = False
            outcomes: list[Outcome] = [*kept.excluded, *untrained_outcomes([selected.group for selected in groups])]
            examples = self._prepare_examples([selected.group for selected in groups])
            if kept.samples:
                prepared = self._prepare(kept.samples)
                steps = self._optimize(prepared, factor, examples)
                if steps:
                    metrics |= pass_metrics(prepared, steps, self._version, self._algorithm)
                    records = make_token_records(kept.samples, prepared, steps, self._record_groups)
                is_changed = any(POLICY in step.modules and step.optim.applied for step in steps)
                reference = prepared.outputs.reference_logprobs
                if kl is not None and reference is not None:  # adapt the coefficient to the divergence on this batch
                    divergence = kl_reference(prepared.batch, reference)
                    self._kl_coef = kl.adapt_coefficient(self._kl_coef, divergence, len(prepared.batch.attempts))
                without_loss = REJECTED if self._algorithm.token_mask is None else MASKED
                outcomes = [*batch_outcomes(prepared, steps, without_loss), *outcomes]
            if examples is not None and not any(POLICY in step.modules for step in steps):
                self._imitate(examples)  # the step has nothing else to learn from
                is_changed = self._trainer.optim_step(factor).applied
            if examples is not None:
                metrics["examples"] = float(len(examples.batch.attempts))
                metrics["example_loss"], self._example_losses = fmean(self._example_losses), []
            self._version += is_changed
            if kl is not None and kl.sync_steps:
                is_due = self._step % kl.sync_steps == 0
                if is_due:
                    self._trainer.sync_reference(kl.sync_alpha)
                metrics["reference_synced"] = float(is_due)
            version = self.publish().version
            return UpdateReport(self._step, version, metrics, tuple(outcomes), self._trainer.micro_tokens, records)

    async def losses(self, groups: Sequence[Group]) -> list[tuple[float, int]]:
        """Return, for each trainable attempt, the sum of -log pi over its action tokens, and their number."""
        return await self._thread.run(self._losses, groups)

    def _losses(self, groups: Sequence[Group]) -> list[tuple[float, int]]:
        samples = select_trainable(groups, self._reward_weights).samples
        if not samples:
            return []
        batch = assemble_batch(samples, self._packing)
        logprobs = self._trainer.logprobs(batch, "policy")  # (N,)
        sums, counts = segment_sum(-logprobs, batch.token_trajectory), segment_count(batch.token_trajectory)  # (M,)
        return list(zip(sums.tolist(), counts.tolist(), strict=True))

    def publish(self) -> WeightUpdate:
        """Return the policy's current weights and their version. The weights are not copied."""
        if self._published is None:
            self._published = self._trainer.publish(self._version, self._step)
        return self._published

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights, and count the new weights as a new version."""
        self._trainer.load_weights(weights)
        self._version += 1
        self._published = None

    def state(self, folder: Path | None = None, *, copy: bool = True) -> TrainerState:
        """Return the state of updater and trainer, without the policy's weights. See :meth:`TrainerBackend.state`."""
        state = self._trainer.state(folder, copy=copy)
        own = {"step": self._step, "version": self._version, "kl_coefficient": self._kl_coef}
        roles = {f"{ROLE_BASELINE}{role}": baseline for role, baseline in self._role_baselines.items()}
        return replace(state, scalars={**own, **roles, **state.scalars})

    def load_state(self, state: TrainerState) -> None:
        self._trainer.load_state(state)
        self._step, self._version = int(state.scalars["step"]), int(state.scalars["version"])
        self._kl_coef = float(state.scalars["kl_coefficient"])
        self._role_baselines = {
            name.removeprefix(ROLE_BASELINE): float(value)
            for name, value in state.scalars.items()
            if name.startswith(ROLE_BASELINE)
        }
        self._published = None

    def _prepare_examples(self, groups: Sequence[Group]) -> PreparedBatch | None:
        # The examples are a batch of their own, so that they are in no baseline and in no metric of the policy. Their
        # loss is coef / G sum_e mean_t -log pi(e_t), for the examples e of G groups.
        given = [replace(one, trajectories=(one.example,), greedy=None) for one in groups if one.example is not None]
        if not given or not self._example_coef or self._step <= self._algorithm.warmup:
            return None
        samples = select_trainable(given, self._reward_weights).samples
        if not samples:
            return None
        batch = assemble_batch(samples, self._packing)
        lengths = segment_count(batch.token_trajectory)[batch.token_trajectory]  # (N,) tokens of each token's example
        zero = torch.zeros(len(batch.ids), dtype=torch.float64)
        sft_weight = self._example_coef / (len(groups) * lengths.double())
        weights = TokenWeights(zero, loss_weight=zero, importance_weight=zero + 1, sft_weight=sft_weight)
        return PreparedBatch(batch, weights, ModelOutputs(), None)

    def _imitate(self, examples: PreparedBatch) -> None:
        passed = self._trainer.forward_backward(examples, scale=1.0, modules=frozenset((POLICY,)))
        self._example_losses.append(float(passed.metrics["sft_loss"]))

    def _prepare(self, samples: Sequence[TrainingSample]) -> PreparedBatch:
        algorithm, trainer, needs = self._algorithm, self._trainer, self._algorithm.needs
        distillation = algorithm.distillation
        loss_excluded = algorithm.filters.loss_excluded(samples)
        with measure("packing"):
            reward_weights = weights_at(self._reward_weights, self._reward_schedules, self._step)
            batch = assemble_batch(samples, self._packing, algorithm.token_scope, reward_weights, loss_excluded)

        if isinstance(algorithm.advantage, AgainstRole):
            roles = [sample.role for sample in samples]
            baseline, self._role_baselines = algorithm.advantage.track(self._role_baselines, roles, batch.returns)
            batch = replace(batch, role_baseline=baseline)

        # An extra pass computes log pi_old, the log-probabilities of the policy before the update, in three cases: the
        # algorithm corrects the mismatch between trainer and sampler; older weights sampled a token (the batch is
        # stale), and the advantages depend on the policy; or the ratio is taken to the policy before the update, and
        # the update uses each trajectory several times. Otherwise the training pass computes log pi_old itself.
        is_stale = batch.staleness(self._version) > 0
        passes = algorithm.epochs * min(self._config.minibatches, len(batch.attempts))
        repeats = passes > 1 and algorithm.ratio_denominator == "old_policy" and not is_stale
        needs_old = algorithm.corrects_mismatch or (algorithm.advantage.uses_policy and is_stale) or repeats
        needs_entropy = algorithm.token_mask is not None and algorithm.token_mask.needs_entropy
        outputs = ModelOutputs(
            old_logprobs=trainer.logprobs(batch, "policy") if needs_old else None,
            values=trainer.values(batch) if "critic" in needs else algorithm.advantage.state_values(batch),
            reference_logprobs=trainer.logprobs(batch, "reference") if "reference" in needs else None,
            teacher_logprobs=trainer.logprobs(batch, "teacher") if "teacher" in algorithm.advantage.needs else None,
            entropy=trainer.entropy(batch) if needs_entropy else None,
            teacher_top=None if distillation is None else trainer.top_tokens(batch, distillation.top_k),
        )

        # If the batch is stale, pi_old is the sampler's policy, so that clipping bounds the distance from the sampler's
        # policy. If the algorithm has a correction, pi_old stays the policy before the update: the importance weights
        # already account for the distance from the sampler's policy.
        from_sampler = algorithm.ratio_denominator == "sampler" or (is_stale and algorithm.correction is None)
        old_logprobs = batch.sampler_logprobs if from_sampler else outputs.old_logprobs
        with measure("packing"):
            weights = algorithm.compute_token_weights(batch, outputs, self._kl_coef)
        return PreparedBatch(batch, weights, outputs, old_logprobs)

    def _optimize(self, prepared: PreparedBatch, factor: float, examples: PreparedBatch | None) -> list[OptimizerStep]:
        # A module without a gradient takes no step, because momentum would change its weights.
        batch, weights, targets = prepared.batch, prepared.weights, prepared.weights.value_targets
        gradients: dict[Module, set[int]] = {}  # the trajectories that contribute to the gradient of each module
        if self._step > self._algorithm.warmup:  # during the warm-up, only the critic is trained
            mask = self._algorithm.policy_gradient_mask(weights)  # (N,)
            gradients[POLICY] = set(batch.token_trajectory[mask].tolist())
        if targets is not None:
            before, after = targets.weight.before_token > 0, targets.weight.after_action > 0  # (N,), (S,)
            states = (*batch.token_trajectory[before].tolist(), *batch.turn_trajectory[after].tolist())
            gradients[CRITIC] = set(states)
        numbers = sorted(set[int]().union(*gradients.values()))
        modules = frozenset(module for module, trajectories in gradients.items() if trajectories)
        config, epochs = self._config, self._algorithm.epochs
        phases = [(modules, epochs, config.minibatches)]
        if config.critic_epochs is not None:
            policy, critic = modules & {POLICY}, modules & {CRITIC}
            phases = [(policy, epochs, config.minibatches), (critic, config.critic_epochs, config.critic_minibatches)]
        steps: list[OptimizerStep] = []
        for trained, epochs, minibatches in phases:
            count = min(minibatches, len(numbers))
            for epoch in range(epochs if trained else 0):
                order = list(numbers)
                random.Random(f"{self._seed}|{self._step}|{epoch}").shuffle(order)
                for trajectories in (frozenset(order[first::count]) for first in range(count)):
                    # The loss is scaled up, so that the expected gradient of a minibatch is the gradient of the batch.
                    scale = len(order) / len(trajectories)
                    sequences = tuple(one for one in batch.sequences if one.trajectory in trajectories)
                    minibatch = replace(prepared, batch=replace(batch, sequences=sequences))
                    imitated = examples if POLICY in trained else None
                    if imitated is not None:
                        self._imitate(imitated)
                    limit = self._trainer.micro_tokens
                    passed = self._trainer.forward_backward(minibatch, scale=scale, modules=trained)
                    if imitated is not None and self._trainer.micro_tokens < limit:
                        # Memory ran out: before the repetition, all gradients were cleared.
                        self._example_losses.pop()
                        self._imitate(imitated)
                    steps.append(OptimizerStep(trained, trajectories, passed, self._trainer.optim_step(factor)))
        return steps


# The report of an update


def reward_metrics(selection: Selection, kept: Selection) -> dict[str, float]:
    """Return metrics of rewards before, and of attempts excluded by, the filters; NaN for the mean of nothing."""
    rewards = [sample.total for sample in selection.samples]
    failed = len(selection.excluded)
    groups: dict[int, list[float]] = {}
    for sample in selection.samples:
        groups.setdefault(sample.group, []).append(sample.total)
    several = [group for group in groups.values() if len(group) > 1]  # a group of one has no spread
    spreads = [pstdev(group) for group in several]
    constant = [fmean(group) for group, spread in zip(several, spreads, strict=True) if spread <= MIN_STD]
    return {
        "reward": fmean(rewards) if rewards else math.nan,  # of all trainable attempts, filtered ones included
        "reward_spread": fmean(spreads) if spreads else math.nan,  # mean standard deviation within a group
        "constant_groups": len(constant) / len(several) if several else math.nan,
        # the constant groups whose return is not positive, and the others
        "dead_groups": sum(mean <= RETURN_TOLERANCE for mean in constant) / len(several) if several else math.nan,
        "solved_groups": sum(mean > RETURN_TOLERANCE for mean in constant) / len(several) if several else math.nan,
        "failed": float(failed),  # attempts that cannot be used for training
        "filtered": float(len(kept.excluded) - failed),  # trainable attempts that the algorithm's filters excluded
    }


def pass_metrics(
    prepared: PreparedBatch, steps: Sequence[OptimizerStep], version: int, algorithm: Algorithm
) -> dict[str, float]:
    """Return the metrics of the optimizer steps over a batch, before which the policy had ``version``."""
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
        "staleness": float(batch.staleness(version)),  # updates since the oldest token was sampled
        "action_tokens": float(actions.sum()),
        "model_tokens": float(model_tokens),  # that the models read in the first epoch; a shared prefix counts once
        "padding": 1 - sum(one.num_tokens for one in passes) / sum(one.num_padded_tokens for one in passes),
        "skipped_steps": float(sum(not step.optim.applied for step in steps)),  # loss or gradient not finite
    }
    if of_policy := [one for one in passes if len(one.tokens)]:
        tokens, logprobs = _logprobs_before_update(prepared, of_policy[0])
        # trainer and sampler differ by rounding; if older weights sampled a token, also by the updates since then
        gap = (logprobs - batch.sampler_logprobs[tokens])[batch.sampled[tokens]]
        metrics |= {
            "entropy": float(_first_entropies(prepared, of_policy)[actions].nanmean()),  # nats per action token
            "first_ratio_deviation": float((of_policy[0].ratios - 1).abs().max()),  # before any weight changes
        }
        if len(gap):  # not of transcripts, which no engine sampled
            metrics |= {"logprob_gap": float(gap.abs().max()), "logprob_gap_mean": float(gap.abs().mean())}
    by_step: dict[str, list[float]] = {}  # terms of the loss and norms of gradients: one number per applied step
    for step in steps:
        if step.optim.applied:
            terms = {name: float(value) for name, value in step.passed.metrics.items()}
            norms = {f"{module}_gradient_norm": norm for module, norm in step.optim.gradient_norms.items()}
            for name, value in {**terms, **norms}.items():
                by_step.setdefault(name, []).append(value)
    return {**metrics, **_model_metrics(prepared, algorithm), **{name: fmean(one) for name, one in by_step.items()}}


def _first_entropies(prepared: PreparedBatch, passes: Sequence[PassStats]) -> Tensor:
    # (N,) the policy's entropy at each token, from the first pass that read it; NaN if no pass read it
    entropy = torch.full((len(prepared.batch.ids),), math.nan, dtype=torch.float64)
    for one in reversed(passes):
        entropy[one.tokens] = one.entropy.double()
    return entropy


def _logprobs_before_update(prepared: PreparedBatch, first: PassStats) -> tuple[Tensor, Tensor]:
    # (tokens, log-probabilities) under the policy before the update: of all N tokens if an extra pass read the batch,
    # otherwise of the tokens of the first pass of the update
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
    """Return the estimate k1 of KL(sampler || reference): the mean over the action tokens."""
    return float((batch.sampler_logprobs - reference)[batch.action_mask].mean())


def batch_outcomes(prepared: PreparedBatch, steps: Sequence[OptimizerStep], without_loss: str) -> list[Outcome]:
    """Return the outcome of each attempt. ``without_loss`` is the reason if no token has a policy loss."""
    batch, weights = prepared.batch, prepared.weights
    # steps of the critic count only if there are no others, as during its warm-up
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
    """Return one record for each turn of the first ``groups`` groups that the steps used."""
    if not groups:
        return ()
    batch = prepared.batch
    used = set[int]().union(*(step.trajectories for step in steps))
    chosen = sorted({samples[number].group for number in used})[:groups]
    weights, values = prepared.weights, prepared.outputs.values
    passes = [step.passed for step in steps if len(step.passed.tokens)]  # passes that ran the policy
    logprobs = torch.full_like(weights.advantage, math.nan)  # (N,)
    if passes:
        tokens, known = _logprobs_before_update(prepared, passes[0])
        logprobs[tokens] = known
    rows = [logprobs, weights.advantage, weights.loss_weight * weights.importance_weight]
    rows += [_first_entropies(prepared, passes), *([] if values is None else [values.before_token])]
    columns = torch.stack(rows)  # (4, N), or (5, N) with values: the numbers of each token
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
