"""The interface between the training loop and the process (or processes) that holds the trained models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenWeights, TopTokens
from agent_r1.core.weights import WeightUpdate
from agent_r1.data.batch import TrainingBatch

Role = Literal["policy", "reference", "teacher"]
"""The name of a language model that a trainer holds."""

Module = Literal["policy", "critic"]
"""The name of a module that a trainer trains."""

POLICY: Module = "policy"
CRITIC: Module = "critic"
MODULES: frozenset[Module] = frozenset((POLICY, CRITIC))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch with everything that its loss needs, computed before the first forward and backward pass.

    Attributes:
        batch: the tokens, and the sequences that the models read. A minibatch has all tokens of the batch, but only
            some of its sequences.
        weights: advantage and loss weight of each token. Loss weights are normalized over the whole batch, so the
            losses of micro-batches and of ranks are added without a further factor.
        outputs: outputs of the models for the batch, computed with the weights before the update.
        old_logprobs: (N,) log pi_old; pi_old is the denominator of the importance ratio. None if the batch is used in
            only one pass, with the weights that sampled it. Then pi_old is the policy itself, and every ratio is 1.
    """

    batch: TrainingBatch
    weights: TokenWeights
    outputs: ModelOutputs
    old_logprobs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PassStats:
    """Statistics of one forward and backward pass. Tensors have no gradient and are on the CPU.

    n is the number of tokens of the training batch that the policy predicted in the pass. Usually these are the action
    tokens. If the pass trained only the critic, n is 0.

    Attributes:
        loss: () sum of the losses of all micro-batches.
        metrics: terms of the loss by name, each summed over all micro-batches.
        tokens: (n,) index of each token in the batch.
        logprobs: (n,) log pi of each token.
        ratios: (n,) pi / pi_old of each token.
        entropy: (n,) entropy of the policy at each token, in nats.
        num_tokens: number of all tokens in the sequences of the pass, including prompts, without padding.
        num_padded_tokens: number of all tokens in the sequences of the pass, including prompts and padding.
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
        applied: False if the loss or a gradient was not finite. Then no weight and no moment has changed.
        gradient_norms: norm of the gradient of each trained module, before clipping.

    Example:
        OptimStats(applied=True, gradient_norms={"policy": 0.42})
    """

    applied: bool
    gradient_norms: Mapping[Module, float]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """The state of training, without the policy's weights.

    Attributes:
        tensors: optimizer moments, weights of the critic, and weights of a reference that is synchronized with the
            policy. These tensors are stored as safetensors. If the trainer has several processes, the field is a
            :class:`agent_r1.model.tensor_files.TensorFiles`, which refers to files that the processes have written.
        scalars: counters, coefficients and checksums. These values are stored as JSON.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float | str]


class Trainer(Protocol):
    """A service that holds the models of an algorithm, computes gradients and takes optimizer steps.

    A trainer is one process, or several ranks that the caller controls like one process. All methods block the calling
    thread, so call them from a worker thread.
    """

    @property
    def micro_tokens(self) -> int:
        """The maximum number of tokens in a micro-batch.

        If memory has run out, this is less than the configured number.
        """
        ...

    @property
    def supports_tree_attention(self) -> bool:
        """Whether the models can read several branches of a trajectory as one sequence, with a tree attention mask."""
        ...

    @property
    def arithmetic(self) -> str:
        """A text about the implementations that decide the rounding errors of an update, for the record of a run.

        The text names the library that computes matrix products, and says whether prefixes are shared.

        Example:
            "products by oneDNN and prefixes shared by parts"
        """
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability that the model ``role`` gives to each token: (N,) float64 on the CPU.

        ``role`` is "policy", "reference" or "teacher".
        """
        ...

    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy at each token, in nats: (N,) float64 on the CPU."""
        ...

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        """Return the teacher's k most likely tokens at the position of each of the N tokens of the batch.

        The ids and the log-probabilities in the result have the shape (N, k). k is the smallest of three numbers:
        ``count``, the vocabulary size of the policy, and the vocabulary size of the teacher. Only tokens of the
        policy's vocabulary are returned.
        """
        ...

    def values(self, batch: TrainingBatch) -> StateValues:
        """Return the critic's values of the states of the batch, in float64 on the CPU.

        There is a value for the state before each of the N tokens of the batch, and a value for the state after the
        action of each of the S turns.
        """
        ...

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        """Compute ``scale`` times the loss of the batch, and the gradient of this loss for ``modules``.

        ``modules`` is a set with "policy", "critic" or both. Return statistics of the pass. Call :meth:`optim_step`
        once after each call of this method.

        Raises:
            OutOfMemory: the smallest possible micro-batch does not fit in memory.
        """
        ...

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        """Clip and apply the gradients of the last :meth:`forward_backward`, then clear all gradients.

        The learning rates of this step are the configured learning rates times ``learning_rate_factor``.
        """
        ...

    def sync_reference(self, alpha: float) -> None:
        """Set the weights of the reference to alpha * policy + (1 - alpha) * reference."""
        ...

    def publish(self, number: int, step: int) -> WeightUpdate:
        """Return the policy's current weights as version ``number``, made by optimizer step ``step``.

        The weights are not copied: the update holds a reference to them.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's trained weights. ``weights`` maps the name of each weight to its new tensor."""
        ...

    def state(self, folder: Path | None = None) -> TrainerState:
        """Return a copy of the trainer's state, without the policy's weights.

        The tensors are copied to the CPU. A trainer that runs in several processes writes the tensors to files in
        ``folder`` instead. This folder need not exist.
        """
        ...

    def load_state(self, state: TrainerState) -> None:
        """Restore ``state``. Before this call, load the policy's weights that were saved together with ``state``.

        Raises:
            InvalidInput: the state was saved for different weights, a different algorithm or a different model.
        """
        ...

    def close(self) -> None:
        """End the other processes of the trainer, if there are any. Call no other method afterwards."""
        ...
