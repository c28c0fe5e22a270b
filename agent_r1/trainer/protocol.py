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
    """A batch with everything that its loss needs, computed before the first forward and backward pass.

    Attributes:
        batch: the N tokens, and the sequences of tokens that a pass reads. If the batch is limited to a minibatch (the
            part that one optimizer step uses), ``batch.sequences`` has only the sequences of the minibatch. The tensors
            of N tokens do not become shorter.
        weights: advantages and loss weights. The loss weights are normalized over the whole batch.
        outputs: the outputs of the models before the update.
        old_logprobs: (N,) log pi_old, for the importance ratio pi / pi_old of each token. pi is the probability of the
            token under the current policy, and pi_old the probability under an earlier policy. None: every ratio is 1.
    """

    batch: TrainingBatch
    weights: TokenWeights
    outputs: ModelOutputs
    old_logprobs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PassStats:
    """Statistics of one forward and backward pass. Tensors have no gradient and are on the CPU.

    n is the number of tokens that the policy predicted. If only the critic was trained, n is 0.

    Attributes:
        loss: () sum of the losses of all micro-batches.
        metrics: terms of the loss by name, each summed over all micro-batches.
        tokens: (n,) index of each predicted token in the batch.
        logprobs: (n,) log pi, the log-probability of each predicted token.
        ratios: (n,) importance ratio pi / pi_old of each predicted token (see ``PreparedBatch.old_logprobs``).
        entropy: (n,) entropy of the policy at each predicted token, in nats.
        num_tokens: number of tokens that the models read. Prompts count, and padding does not count.
        num_padded_tokens: number of tokens that the models read. Prompts and padding count.
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
    """The result of one optimizer step, such as ``OptimStats(applied=True, gradient_norms={"policy": 0.42})``.

    Attributes:
        applied: False if the loss or a gradient was not finite. Then no weight and no moment has changed.
        gradient_norms: norm of each trained module's gradient, before clipping.
    """

    applied: bool
    gradient_norms: Mapping[Module, float]


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """The state of training, without the policy's weights.

    Attributes:
        tensors: optimizer moments, weights of the critic, and weights of the reference if the algorithm changes the
            reference during the run. In a trainer with several processes, the tensors are in files (``TensorFiles``).
        scalars: counters, coefficients and checksums.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float | str]


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
        """A text that names the library for matrix products, and says how sequences share a common prefix.

        If two trainers have different texts, the rounding errors of their updates can differ.
        """
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability that the model ``role`` gives to each of the batch's N tokens."""
        ...

    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy, in nats, at each of the batch's N tokens: (N,) float64 on the CPU."""
        ...

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        """Return the teacher's k most likely tokens at the position of each token in the batch.

        The tensors of the result have the shape (N, k), for the batch's N tokens. k is the smallest of three numbers:
        ``count``, the policy's vocabulary size, the teacher's vocabulary size. Only tokens of the policy's vocabulary
        are returned.
        """
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

    def state(self, folder: Path | None = None) -> TrainerState:
        """Return a copy, on the CPU, of the trainer's state without the policy's weights."""
        ...

    def load_state(self, state: TrainerState) -> None:
        """Restore ``state``. Before this call, load the policy's weights that were saved together with ``state``."""
        ...

    def close(self) -> None:
        """End all processes that the trainer has started. Call no method of the trainer afterwards."""
        ...
