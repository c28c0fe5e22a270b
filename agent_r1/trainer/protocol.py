"""The interface between the training loop and the process, or the processes, that hold the trained model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenWeights
from agent_r1.core.weights import WeightUpdate
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
    """A batch with everything that its loss needs, known before the first pass.

    Attributes:
        batch: the tokens, and the sequences that the model reads. A minibatch has fewer sequences and the same columns.
        weights: advantage and loss weight of each token. Loss weights are normalized over the whole batch, so the
            losses of minibatches, micro-batches and ranks are plain sums.
        outputs: model outputs under the weights that the update begins with.
        old_logprobs: (N,) log pi_old, the denominator of the ratio. None if the batch is used for one pass on
            the weights that sampled it: then pi_old is the policy itself and every ratio is 1.
    """

    batch: TrainingBatch
    weights: TokenWeights
    outputs: ModelOutputs
    old_logprobs: Tensor | None

    def minibatch(self, trajectories: Collection[int]) -> PreparedBatch:
        """Return the same batch with the sequences of these trajectories only."""
        sequences = tuple(sequence for sequence in self.batch.sequences if sequence.trajectory in trajectories)
        return replace(self, batch=replace(self.batch, sequences=sequences))


@dataclass(frozen=True, slots=True, eq=False)
class PassStats:
    """Statistics of one forward and backward pass over n tokens. Tensors have no gradient and are on the CPU.

    A pass that trains the critic alone does not run the policy: n is 0.

    Attributes:
        loss: () the sum over all micro-batches.
        metrics: terms of the loss by name, summed in the same way.
        tokens: (n,) index of each token in the batch.
        logprobs: (n,) log pi.
        ratios: (n,) pi / pi_old.
        entropy: (n,) in nats.
        num_tokens: tokens that the model read, without padding.
        num_padded_tokens: tokens that the model read, with padding.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    tokens: Tensor
    logprobs: Tensor
    ratios: Tensor
    entropy: Tensor
    num_tokens: int
    num_padded_tokens: int


@dataclass(frozen=True, slots=True)
class OptimStats:
    """The result of one optimizer step.

    Attributes:
        applied: False if the loss or a gradient was not finite; no weight or moment has changed then.
        gradient_norms: norm of the gradient before clipping, by module.

    Example:
        OptimStats(applied=True, gradient_norms={"policy": 0.42})
    """

    applied: bool
    gradient_norms: Mapping[Module, float]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """The state of training besides the policy's weights.

    Attributes:
        tensors: optimizer moments, and the weights of the critic and of a reference that changes, to be stored as
            safetensors.
        scalars: counters and checksums, to be stored as JSON.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float | str]


class Trainer(Protocol):
    """Holds the policy and the models beside it, computes losses and gradients, and applies them.

    One process, or several ranks that are driven as one. Methods block; call them from a worker thread.
    """

    @property
    def micro_tokens(self) -> int:
        """Maximum number of tokens in a micro-batch: less than configured once memory ran out."""
        ...

    @property
    def supports_tree_attention(self) -> bool:
        """Whether branches of a trajectory can share a prefix in one sequence."""
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability of each token, (N,) float64 on the CPU."""
        ...

    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy at each token, in nats, (N,) float64 on the CPU."""
        ...

    def values(self, batch: TrainingBatch) -> StateValues:
        """Return the critic's values before each token and after each turn's action, float64 on the CPU."""
        ...

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        """Compute ``scale`` times the algorithm's loss on the batch's sequences, and its gradient for ``modules``.

        Each call is followed by one :meth:`optim_step`.

        Raises:
            OutOfMemory: a micro-batch of a single sequence does not fit in memory.
        """
        ...

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        """Clip and apply the gradients of the last :meth:`forward_backward`, and clear them.

        The configured learning rates are multiplied by ``learning_rate_factor`` in this step.
        """
        ...

    def sync_reference(self, alpha: float) -> None:
        """Move the reference towards the policy: reference <- alpha policy + (1 - alpha) reference."""
        ...

    def publish(self, number: int, step: int) -> WeightUpdate:
        """Return the policy's current weights, by reference, as version ``number`` made by optimizer step ``step``."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's weights."""
        ...

    def state(self) -> TrainerState:
        """Return a copy, on the CPU, of the state besides the policy's weights."""
        ...

    def load_state(self, state: TrainerState) -> None:
        """Continue from ``state``.

        Raises:
            InvalidInput: the state belongs to other weights, another algorithm or another model.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the policy's weights and the state to ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Read back what :meth:`save` wrote."""
        ...
