"""The learner: groups of trajectories in, new weights out. One process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.acting import Weights
from agent_r1.core.attempt import Attempt
from agent_r1.core.errors import InvalidInput
from agent_r1.core.record import Fate
from agent_r1.core.trajectory import Group
from agent_r1.learn.batch import Batch, assemble
from agent_r1.learn.config import LearnerConfig
from agent_r1.learn.metrics import Step, pass_metrics, reward_metrics
from agent_r1.learn.optimizer import Optimizer, Trained, overwrite
from agent_r1.learn.passes import Models, Prepared, learn
from agent_r1.learn.row import Row, Signals
from agent_r1.learn.samples import admit, sift
from agent_r1.learn.sequences import causal_sequences, tree_sequences
from agent_r1.model.digest import digest
from agent_r1.model.forward import obeys_tree_mask
from agent_r1.model.value import value_model

NOT_FINITE = "the loss or a gradient was not finite"
NO_ADVANTAGE = "no advantage in the whole batch"
"""Without it only the optimizer's momentum would move the weights."""


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one set of groups: the ``step``-th update led to weights of ``version``.

    ``fates`` holds every attempt that was handed in, once.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a learner knows beside the policy's weights: for safetensors the one, for JSON the other."""

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | str]


class Learner:
    """Trains ``model`` in place by the algorithm ``row``.

    ``temperature`` is that of sampling. Rewards are summed with ``reward_weights``; a name not in it
    weighs 1. ``seed`` decides which trajectories share a minibatch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        row: Row,
        config: LearnerConfig,
        *,
        temperature: float,
        reward_weights: Mapping[str, float],
        seed: int,
    ) -> None:
        if temperature <= 0:
            raise InvalidInput("temperature", got=temperature, do="train on samples drawn at a temperature above 0")
        self._row, self._config, self._seed = row, config, seed
        self._reward_weights = dict(reward_weights)
        self._step = self._version = 0
        self._digest: tuple[int, str] | None = None
        critic = value_model(model) if "critic" in row.needs else None
        self._models = Models(model.eval(), critic, temperature, config.micro_tokens)
        self._layout = tree_sequences if obeys_tree_mask(model) else causal_sequences
        trained = {"policy": Trained(model, config.learning_rate)}
        if critic is not None:
            trained["critic"] = Trained(critic, config.critic_learning_rate)
        self._optimizer = Optimizer(trained, config.betas, config.weight_decay, config.max_grad_norm)

    def update(self, groups: Sequence[Group]) -> Update:
        """Learn from these groups. Weights and version stay as they are where nothing in them can be learned from."""
        self._step += 1
        admission = admit(groups, self._reward_weights)
        useful = sift(admission, self._row.filters)
        metrics = reward_metrics(admission, useful)
        fates = tuple(self._dropped(out.attempt, out.reason) for out in useful.left_out)
        if useful.samples:
            prepared = self._prepare(assemble(useful.samples, self._layout))
            steps = self._optimise(prepared) if bool(prepared.credit.advantage.any()) else []
            metrics |= pass_metrics(prepared, steps, self._version) if steps else {}
            self._version += any(step.applied for step in steps)
            fates = (*self._fates(prepared.batch, steps), *fates)
        return Update(self._step, self._version, metrics, fates)

    def weights(self) -> Weights:
        """The policy's weights as they are now, by reference."""
        if self._digest is None or self._digest[0] != self._version:
            self._digest = (self._version, digest(self._models.policy))
        return Weights(self._version, "module", self._models.policy, self._digest[1])

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights by these, as a new version."""
        self._models.policy.load_state_dict(dict(weights))
        self._version += 1

    def state(self) -> LearnerState:
        """A copy of everything but the policy's weights, which are a model folder of their own."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}
        return LearnerState(tensors, {"step": self._step, "version": self._version, "policy": self.weights().digest})

    def restore(self, state: LearnerState) -> None:
        """Continue from ``state``; InvalidInput where it belongs to other weights or to another algorithm or model."""
        if state.scalars["policy"] != digest(self._models.policy):
            raise InvalidInput("learner state", got="that of other weights", do="load the model saved beside it first")
        overwrite(self._tensors(), state.tensors)
        self._step, self._version = int(state.scalars["step"]), int(state.scalars["version"])
        self._digest = None

    def _tensors(self) -> dict[str, Tensor]:
        critic = self._models.critic
        weights = {} if critic is None else {f"critic.{name}": tensor for name, tensor in critic.named_parameters()}
        return {**weights, **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()}}

    def _prepare(self, batch: Batch) -> Prepared:
        """Ask the models what has to be known beforehand, and assign credit."""
        values = self._models.values(batch)
        old = self._old_logprobs(batch)
        return Prepared(batch, self._row.credit(batch, Signals(values)), values, old)

    def _old_logprobs(self, batch: Batch) -> Tensor | None:
        """What a ratio compares with: the policy that sampled, so that clipping bounds the distance to it.

        Tokens of older weights bring their own log-probabilities. Else the sampler is the policy as it is now:
        with one pass to come these are that pass's own (None), and no forward pass is spent on them.
        """
        if int(batch.versions.min()) < self._version:
            return batch.sampler_logprobs
        passes = self._row.epochs * min(self._config.minibatches, len(batch.attempts))
        return self._models.logprobs(batch) if passes > 1 else None

    def _optimise(self, prepared: Prepared) -> list[Step]:
        return [
            self._take(prepared, chosen)
            for epoch in range(self._row.epochs)
            for chosen in self._minibatches(len(prepared.batch.attempts), epoch)
        ]

    def _minibatches(self, trajectories: int, epoch: int) -> list[frozenset[int]]:
        """Whole trajectories, dealt out at random."""
        order = list(range(trajectories))
        random.Random(f"{self._seed}|{self._step}|{epoch}").shuffle(order)
        count = min(self._config.minibatches, trajectories)
        return [frozenset(order[first::count]) for first in range(count)]

    def _take(self, prepared: Prepared, chosen: frozenset[int]) -> Step:
        """One optimizer step on the chosen trajectories, weighed up so that its expectation is that on the batch."""
        batch = prepared.batch
        sequences = [sequence for sequence in batch.sequences if sequence.trajectory in chosen]
        seen = learn(self._models, self._row, prepared, sequences, len(batch.attempts) / len(chosen))
        return Step(chosen, seen, self._optimizer.step(seen.loss))

    def _fates(self, batch: Batch, steps: Sequence[Step]) -> list[Fate]:
        """An attempt is trained when one optimizer step that used it was applied."""
        trained = frozenset[int]().union(*(step.trajectories for step in steps if step.applied))
        reason = NOT_FINITE if steps else NO_ADVANTAGE
        return [
            Fate(attempt, "trained", self._step) if number in trained else self._dropped(attempt, reason)
            for number, attempt in enumerate(batch.attempts)
        ]

    def _dropped(self, attempt: Attempt, reason: str) -> Fate:
        return Fate(attempt, "dropped", self._step, reason)
