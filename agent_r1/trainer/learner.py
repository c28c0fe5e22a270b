"""The learner: groups of trajectories in, new weights out. One process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.filters import apply_filters
from agent_r1.algorithms.types import TokenWeights, ModelOutputs
from agent_r1.algorithms.validation import check
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFate
from agent_r1.core.trajectory import STATUS_POLICY, Group
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import by_sequence
from agent_r1.data.segments import segment_sum
from agent_r1.data.sequences import Packing, pack_causal, pack_prefix_tree, within
from agent_r1.data.training_sample import Selection, select_trainable, describe_status
from agent_r1.model.checksum import weights_checksum
from agent_r1.model.forward import obeys_tree_mask
from agent_r1.model.value_head import value_model
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import CRITIC, POLICY, Models, Prepared, blocks_of, learn
from agent_r1.trainer.metrics import Step, kl_reference, pass_metrics, reward_metrics
from agent_r1.trainer.oom_retry import Block, Budget, telling
from agent_r1.trainer.optimizer import Optimizer, Trained, overwrite

T = TypeVar("T")

NOT_FINITE = "the loss or a gradient was not finite"
NO_ADVANTAGE = "no advantage in the whole batch"
"""Without it only the optimizer's momentum would move the weights."""
GREEDY = "greedy attempt, to compare with"
REJECTED = "rejected: sampler and trainer disagree"


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one set of groups: the ``step``-th update led to weights of ``version``.

    ``fates`` holds every attempt that was handed in, once. ``micro_tokens`` is what a pass may hold from now on: less
    than the configuration says once memory ran out.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
    fates: tuple[AttemptFate, ...]
    micro_tokens: int


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a learner knows beside the policy's weights: for safetensors the one, for JSON the other."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float | str]


class Learner:
    """Trains ``model`` in place by the algorithm ``row``.

    ``temperature`` is that of sampling. Rewards are summed with ``reward_weights``; a name not in it
    weighs 1. ``seed`` decides which trajectories share a minibatch. ``teacher`` is the policy to learn from, where
    the algorithm needs one. The policy as it is now is the reference, where it needs that.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        row: Algorithm,
        config: TrainerConfig,
        *,
        temperature: float,
        reward_weights: Mapping[str, float],
        seed: int,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        if temperature <= 0:
            raise InvalidInput("temperature", got=temperature, do="train on samples drawn at a temperature above 0")
        if "teacher" in row.needs and teacher is None:
            raise InvalidInput("teacher", got="none", do=f"name a model: {row.name} learns from one")
        check(row)
        self._row, self._config, self._seed = row, config, seed
        self._reward_weights = dict(reward_weights)
        self._step = self._version = 0
        self._kl_coefficient = 0.0 if row.kl is None else row.kl.coefficient
        self._digest: tuple[int, str] | None = None
        self._models = Models(
            policy=model.eval(),
            temperature=temperature,
            micro_tokens=config.micro_tokens,
            critic=value_model(model) if "critic" in row.needs else None,
            reference=copy.deepcopy(model).requires_grad_(False) if "reference" in row.needs else None,
            teacher=teacher and teacher.eval().requires_grad_(False),
        )
        self._budget = Budget(config.micro_tokens)
        layout: Packing = pack_prefix_tree if obeys_tree_mask(model) else pack_causal
        # With a ratio of whole trajectories all sequences of one go together, and paths are longer than trees in all.
        self._layout = layout if row.ratio == "trajectory" else within(layout, lambda: self._budget.tokens)
        trained = _trained(self._models, config)
        self._optimizer = Optimizer(trained, config.betas, config.weight_decay, config.max_grad_norm)

    def update(self, groups: Sequence[Group]) -> Update:
        """Learn from these groups. Weights and version stay as they are where nothing in them can be learned from.

        Raises OutOfMemory where that does not fit, in the smallest passes either.
        """
        attempts = sum(len(group.trajectories) for group in groups)
        with telling(f"an update on {attempts} attempts, in passes of {self.micro_tokens} tokens"):
            return self._updated(groups)

    def _updated(self, groups: Sequence[Group]) -> Update:
        self._step += 1
        admission = select_trainable(groups, self._reward_weights)
        useful = apply_filters(admission, self._row.filters, self._version)
        metrics = reward_metrics(admission, useful)
        fates = (*(self._dropped(out.attempt, out.reason) for out in useful.excluded), *self._beside(groups))
        if useful.samples:
            muted = self._row.filters.loss_excluded(useful.samples)
            batch = assemble(useful.samples, self._layout, self._row.scope, self._reward_weights, muted)
            prepared = self._prepare(batch)
            moving = self._moving(prepared.credit)
            steps = self._optimise(prepared, moving) if moving else []
            metrics |= pass_metrics(prepared, steps, self._version) if steps else {}
            self._version += POLICY in moving and any(step.applied for step in steps)
            self._steer(prepared)
            fates = (*self._fates(prepared, steps), *fates)
        return Update(self._step, self._version, metrics, fates, self.micro_tokens)

    def teaches(self, group: Group) -> bool:
        """Whether anything of a group would be learned from."""
        return bool(apply_filters(self.admission(group), self._row.filters, self._version).samples)

    def admission(self, group: Group) -> Selection:
        """Which attempts of a group could be learned from at all, and why the others could not."""
        return select_trainable([group], self._reward_weights)

    def publish(self) -> WeightUpdate:
        """The policy's weights as they are now, by reference."""
        if self._digest is None or self._digest[0] != self._version:
            self._digest = (self._version, weights_checksum(self._models.policy))
        version = PolicyVersion(self._version, self._step, self._digest[1])
        return WeightUpdate(version, "shared_memory", self._models.policy)

    @property
    def asks_greedy(self) -> bool:
        """Whether each group comes with a greedy attempt, to compare the others with."""
        return "greedy" in self._row.needs

    @property
    def micro_tokens(self) -> int:
        """What a pass may hold: less than the configuration says once memory ran out."""
        return self._budget.tokens

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights by these, as a new version."""
        self._models.policy.load_state_dict(dict(weights))
        self._version += 1

    def state(self) -> LearnerState:
        """A copy of everything but the policy's weights, which are a model folder of their own.

        The reference is not part of it, only its checksum: it is the model that the run began with.
        """
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        scalars: dict[str, int | float | str] = {
            "step": self._step,
            "version": self._version,
            "policy": self.publish().version.checksum or "",
            "reference": self._reference_digest(),
            "kl_coefficient": self._kl_coefficient,
            "micro_tokens": self._budget.tokens,
        }
        return LearnerState(tensors, scalars)

    def restore(self, state: LearnerState) -> None:
        """Continue from ``state``; InvalidInput where it belongs to other weights or to another algorithm or model."""
        if state.scalars["policy"] != weights_checksum(self._models.policy):
            raise InvalidInput("learner state", got="that of other weights", do="load the model saved beside it first")
        if state.scalars["reference"] != self._reference_digest():
            do = "make the learner of the model that the run began with, then load the saved weights into it"
            raise InvalidInput("learner state", got="that of a run with another reference policy", do=do)
        overwrite(self._tensors(), state.tensors)
        self._step, self._version = int(state.scalars["step"]), int(state.scalars["version"])
        self._kl_coefficient = float(state.scalars["kl_coefficient"])
        # Sums in another order would be other bits; lowered by hand, they are what was asked for.
        self._budget.tokens = min(int(state.scalars["micro_tokens"]), self._config.micro_tokens)
        self._digest = None

    def _reference_digest(self) -> str:
        return "" if self._models.reference is None else weights_checksum(self._models.reference)

    def _tensors(self) -> dict[str, Tensor]:
        critic = self._models.critic
        weights = {} if critic is None else {f"critic.{name}": tensor for name, tensor in critic.named_parameters()}
        return {**weights, **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()}}

    def _prepare(self, batch: TrainingBatch) -> Prepared:
        """Ask the models what has to be known beforehand, and assign credit."""
        blocks, asks = by_sequence(batch.sequences), self._asks_old(batch)
        said = self._fitting(blocks, lambda models: models.signals(batch))
        asked = self._fitting(blocks, lambda models: models.logprobs(batch)) if asks else None
        signals = replace(said, old=asked, kl_coefficient=self._kl_coefficient)
        return Prepared(batch, self._row.credit(batch, signals), signals, self._old(batch, signals))

    def _fitting(self, blocks: Sequence[Block], work: Callable[[Models], T]) -> T:
        """``work`` with models whose passes fit in memory; begun again with smaller ones where it ran out."""

        def in_passes_of(tokens: int) -> T:
            return work(replace(self._models, micro_tokens=tokens))

        return self._budget.spend(in_passes_of, blocks, self._optimizer.forget)

    def _stale(self, batch: TrainingBatch) -> bool:
        return int(batch.versions.min()) < self._version

    def _asks_old(self, batch: TrainingBatch) -> bool:
        """Whether a forward pass has to tell what the policy says before the update.

        With one pass to come that pass tells it, and none is spent on it.
        """
        if self._row.compares:
            return True
        passes = self._row.epochs * min(self._config.minibatches, len(batch.attempts))
        return passes > 1 and self._row.anchor == "policy" and not self._stale(batch)

    def _old(self, batch: TrainingBatch, signals: ModelOutputs) -> Tensor | None:
        """What a ratio compares with.

        Tokens of older weights bring their own log-probabilities, so that clipping bounds the distance to the policy
        that sampled; unless sampler and trainer are compared: then the correction answers for that distance.
        """
        bypassed = self._row.anchor == "sampler" or (self._stale(batch) and self._row.correction is None)
        return batch.sampler_logprobs if bypassed else signals.old

    def _moving(self, credit: TokenWeights) -> frozenset[str]:
        """The modules that this batch can teach something."""
        weight = credit.advantage * credit.share * credit.trust
        teaches = bool(weight.any()) or (credit.imitation is not None and bool(credit.imitation.any()))
        moving = {POLICY} if teaches and self._step > self._row.warmup else set()
        return frozenset(moving | {CRITIC} if credit.targets is not None else moving)

    def _steer(self, prepared: Prepared) -> None:
        """Adapt the coefficient of the KL."""
        if self._row.kl is not None and prepared.signals.reference is not None:
            divergence = kl_reference(prepared.batch, prepared.signals.reference)
            trajectories = len(prepared.batch.attempts)
            self._kl_coefficient = self._row.kl.steered(self._kl_coefficient, divergence, trajectories)

    def _optimise(self, prepared: Prepared, moving: frozenset[str]) -> list[Step]:
        return [
            self._take(prepared, chosen, moving)
            for epoch in range(self._row.epochs)
            for chosen in self._minibatches(len(prepared.batch.attempts), epoch)
        ]

    def _minibatches(self, trajectories: int, epoch: int) -> list[frozenset[int]]:
        """Whole trajectories, dealt out at random."""
        order = list(range(trajectories))
        random.Random(f"{self._seed}|{self._step}|{epoch}").shuffle(order)
        count = min(self._config.minibatches, trajectories)
        return [frozenset(order[first::count]) for first in range(count)]

    def _take(self, prepared: Prepared, chosen: frozenset[int], moving: frozenset[str]) -> Step:
        """One optimizer step on the chosen trajectories, weighed up so that its expectation is that on the batch."""
        batch = prepared.batch
        sequences = [sequence for sequence in batch.sequences if sequence.trajectory in chosen]
        weight = len(batch.attempts) / len(chosen)
        blocks = blocks_of(sequences, self._row)
        seen = self._fitting(blocks, lambda models: learn(models, self._row, prepared, sequences, weight, moving))
        return Step(chosen, seen, self._optimizer.step(seen.loss, moving))

    def _fates(self, prepared: Prepared, steps: Sequence[Step]) -> list[AttemptFate]:
        """An attempt is trained when one optimizer step that used it was applied; its credit is its advantages' sum."""
        batch = prepared.batch
        trained = frozenset[int]().union(*(step.trajectories for step in steps if step.applied))
        trusted = segment_sum(prepared.credit.trust * batch.action_mask, batch.token_trajectory).tolist()
        credit = segment_sum(prepared.credit.advantage, batch.token_trajectory).tolist()
        fates = []
        for number, attempt in enumerate(batch.attempts):
            if reason := batch.loss_excluded[number] or (REJECTED if not trusted[number] else None):
                fates.append(self._dropped(attempt, reason))
            elif number in trained:
                fates.append(AttemptFate(attempt, "trained", self._step, credit=credit[number]))
            else:
                fates.append(self._dropped(attempt, NOT_FINITE if steps else NO_ADVANTAGE))
        return fates

    def _beside(self, groups: Sequence[Group]) -> list[AttemptFate]:
        """The fates of attempts that are in no group's comparison."""
        best = [group.greedy for group in groups if group.greedy is not None]
        greedy = [(t.attempt, GREEDY if STATUS_POLICY[t.status] == "train" else f"{GREEDY}; {describe_status(t)}") for t in best]
        retried = [(t.attempt, f"tried again after {describe_status(t)}") for group in groups for t in group.retried]
        return [self._dropped(attempt, reason) for attempt, reason in (*greedy, *retried)]

    def _dropped(self, attempt: AttemptId, reason: str) -> AttemptFate:
        return AttemptFate(attempt, "dropped", self._step, reason)


def _trained(models: Models, config: TrainerConfig) -> dict[str, Trained]:
    trained = {POLICY: Trained(models.policy, config.learning_rate)}
    if models.critic is not None:
        trained[CRITIC] = Trained(models.critic, config.critic_learning_rate)
    return trained
