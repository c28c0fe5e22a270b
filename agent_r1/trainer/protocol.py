"""The interface of trainers, and the data that trainers get and return."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenWeights, TopTokens
from agent_r1.core.inference import WeightUpdate
from agent_r1.data.batch import TrainingBatch

Role = Literal["policy", "reference", "teacher"]
"""A language model that a trainer holds."""

Module = Literal["policy", "critic"]
"""A module that a trainer trains."""

POLICY: Module = "policy"
CRITIC: Module = "critic"
MODULES: frozenset[Module] = frozenset((POLICY, CRITIC))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch with all that its loss needs. A minibatch has fewer ``batch.sequences``, but the same tensors."""

    batch: TrainingBatch
    weights: TokenWeights  # the loss weights are normalized over the whole batch
    outputs: ModelOutputs  # before the update
    old_logprobs: Tensor | None  # (N,) log pi_old, for the importance ratio pi / pi_old; None: every ratio is 1


@dataclass(frozen=True, slots=True, eq=False)
class PassStats:
    """Statistics of a pass over n predicted tokens (0 if only the critic was trained): tensors on the CPU."""

    loss: Tensor  # () sum over the micro-batches
    metrics: Mapping[str, Tensor]  # terms of the loss by name, each summed over the micro-batches
    tokens: Tensor  # (n,) index of each predicted token in the batch
    logprobs: Tensor  # (n,) log pi
    ratios: Tensor  # (n,) importance ratio pi / pi_old
    entropy: Tensor  # (n,) of the policy, in nats
    num_tokens: int  # that the models read, prompts included
    num_padded_tokens: int  # the same with padding


@dataclass(frozen=True, slots=True)
class OptimStats:
    """The result of one optimizer step."""

    applied: bool  # False if the loss or a gradient was not finite: then no weight and no moment has changed
    gradient_norms: Mapping[Module, float]  # of each trained module, before clipping


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """The state of training, without the policy's weights."""

    tensors: Mapping[str, Tensor]  # optimizer moments, the critic, and the reference if it changes during the run
    scalars: Mapping[str, int | float | str]  # counters, coefficients and checksums


class TrainerBackend(Protocol):
    """A service that holds the models of an algorithm, computes gradients and takes optimizer steps.

    All methods block the calling thread, so call them from a worker thread.
    """

    @property
    def micro_tokens(self) -> int:
        """The maximum number of tokens in a micro-batch: the configured number, or less if memory has run out."""
        ...

    @property
    def supports_tree_attention(self) -> bool:
        """Whether the models can read the branches of a trajectory as one sequence, with a tree attention mask."""
        ...

    @property
    def arithmetic(self) -> str:
        """A text about the computation: trainers with different texts can have different rounding errors."""
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability that the model ``role`` gives to each of the batch's N tokens."""
        ...

    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy, in nats, at each of the batch's N tokens: (N,) float64 on the CPU."""
        ...

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        """Return the teacher's k most likely tokens at the position of each of the batch's N tokens: (N, k)."""
        ...

    def values(self, batch: TrainingBatch) -> StateValues:
        """Return the critic's values of states, in float64 on the CPU."""
        ...

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        """Compute ``scale`` times the loss of the batch, and the gradient of the scaled loss for ``modules``."""
        ...

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        """Clip and apply the gradients of the last :meth:`forward_backward`, then clear all gradients."""
        ...

    def sync_reference(self, alpha: float) -> None:
        """Set the weights of the reference to alpha * policy + (1 - alpha) * reference."""
        ...

    def publish(self, number: int, step: int) -> WeightUpdate:
        """Return the policy's current weights as a version. The result holds the trainer's own model, not a copy."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's trained weights. ``weights`` maps the name of each trained weight to its new tensor."""
        ...

    def state(self, folder: Path | None = None, *, copy: bool = True) -> TrainerState:
        """Return the trainer's state on the CPU, without the policy's weights.

        Without a copy, the tensors can be the trainer's own, which the next optimizer step changes.
        """
        ...

    def load_state(self, state: TrainerState) -> None:
        """Restore ``state``. Before this call, load the policy's weights that were saved together with ``state``."""
        ...

    def close(self) -> None:
        """End all processes that the trainer has started. Call no method of the trainer afterwards."""
        ...
