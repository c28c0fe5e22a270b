"""A trainer in one process, and the functions that both trainers use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype, PolicyVersion, WeightUpdate
from agent_r1.core.profile import measure
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import Block, PrefixSharing, by_sequence, plan_passes
from agent_r1.model.adapter import has_adapter, load_trained_weights, without_adapter
from agent_r1.model.forward import has_dynamic_rope, supports_tree_mask, use_tree_attention
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.model.vision import ImageProcessor, has_vision
from agent_r1.model.weights import (
    MixedPrecision,
    cast_parameters,
    checkpoint_activations,
    has_onednn,
    mixed_precision,
    product_precision,
    use_onednn,
    weights_checksum,
)
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import ModelSet, TokenBudget, blocks_of, forward_backward
from agent_r1.trainer.optimizer import Optimizer, overwrite
from agent_r1.trainer.protocol import (
    CRITIC,
    MODULES,
    POLICY,
    Module,
    OptimStats,
    PassStats,
    PreparedBatch,
    Role,
    TrainerState,
)

T = TypeVar("T")

LARGE_MODEL = 100_000
"""With ``share_prefixes`` "auto", prefixes are shared only if each model has at least this many parameters."""


class SingleProcessTrainer:
    """A trainer in this process: of ``model`` in place, or of its adapter. See
    :class:`agent_r1.trainer.protocol.TrainerBackend`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        temperature: float,
        teacher: PreTrainedModel | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        check_models(algorithm, temperature, teacher)
        self._algorithm, self._config = algorithm, config
        self._tree_attention = supports_tree_mask(model.eval())
        sharing = self._prefix_sharing(model, teacher)  # before the models are copied, which keep their attention
        self._policy = mixed_precision(model, config.dtype)
        self._trained: tuple[MixedPrecision[Any], ...] = (self._policy,)
        self._critic: MixedPrecision[ValueModel] | None = None
        self._reference: MixedPrecision[PreTrainedModel] | None = None
        if "critic" in algorithm.needs:
            self._critic = mixed_precision(
                build_value_model(model, config.critic_reads_logprobs), config.dtype, keep=("head",)
            )
            self._trained = (self._policy, self._critic)
        if "reference" in algorithm.needs:
            self._reference = make_reference(model, algorithm, config.dtype)
        self._models = ModelSet(
            policy=self._policy.compute,
            temperature=temperature,
            micro_tokens=config.micro_tokens,
            critic=None if self._critic is None else self._critic.compute,
            reference=None if self._reference is None else self._reference.compute,
            teacher=teacher and cast_parameters(teacher.eval().requires_grad_(False), config.dtype),
            sharing=sharing,
            images=images,
        )
        modules: dict[Module, nn.Module] = {POLICY: model}
        if self._critic is not None:
            modules[CRITIC] = self._critic.weights
        if config.activation_checkpointing:
            for trained in self._trained:
                checkpoint_activations(trained.compute, type(model).__name__)
        for computing in (model, *(trained.compute for trained in self._trained), self._models.reference, teacher):
            if computing is not None:
                use_onednn(computing)
        self._optimizer = Optimizer(modules, config)
        self._budget = TokenBudget(config.micro_tokens)
        self._checksum: str | None = None  # of the policy's current weights; None: not computed
        self._last_pass: tuple[Tensor, frozenset[Module]] | None = None  # the loss and the modules of the gradients

    def _prefix_sharing(self, *models: PreTrainedModel | None) -> PrefixSharing | None:
        used = [model for model in models if model is not None]
        if not shares_prefixes(self._config, self._algorithm, used):
            return None
        width = used[0].get_output_embeddings().weight.shape[-1]
        # transformers keeps no keys and values of layers that compute their activations again
        across = not self._config.activation_checkpointing
        return PrefixSharing(width, across, by_parts=all(use_tree_attention(one) for one in used))

    @property
    def micro_tokens(self) -> int:
        return self._budget.tokens

    @property
    def supports_tree_attention(self) -> bool:
        return self._tree_attention

    @property
    def arithmetic(self) -> str:
        return describe_arithmetic(has_onednn(self._policy.compute), self._models.sharing, self._config.dtype)

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.logprobs(batch, role))

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.entropy(batch))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.top_tokens(batch, count))

    def values(self, batch: TrainingBatch) -> StateValues:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.values(batch))

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        stats = self._within_memory(
            blocks_of(batch.batch.sequences, self._algorithm),
            lambda models: forward_backward(models, self._algorithm, batch, scale, modules),
        )
        # several passes can accumulate their gradients for one optimizer step
        loss, before = self._last_pass or (0.0, frozenset())
        self._last_pass = (loss + stats.loss, before | frozenset(modules))
        return stats

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        if self._last_pass is None:
            raise RuntimeError("optim_step needs the gradients of a forward_backward")
        loss, modules = self._last_pass
        self._last_pass = None
        with measure("optimizer"):
            stats = self._optimizer.step(loss, modules, learning_rate_factor)
            if stats.applied:
                for trained in self._trained:
                    trained.refresh()
        if stats.applied and POLICY in modules:
            self._checksum = None
        return stats

    def sync_reference(self, alpha: float) -> None:
        if self._reference is None:
            raise ValueError("this algorithm has no reference")
        pairs = zip(self._reference.weights.parameters(), self._policy.weights.parameters(), strict=True)
        with torch.no_grad():
            for reference, policy in pairs:
                reference.mul_(1 - alpha).add_(policy, alpha=alpha)
        self._reference.refresh()

    def publish(self, number: int, step: int) -> WeightUpdate:
        every = self._config.checksum_every
        checksum = self._current_checksum() if every > 0 and step % every == 0 else None
        return WeightUpdate(PolicyVersion(number, step, checksum), "shared_memory", self._policy.weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_trained_weights(self._policy.weights, weights)
        self._policy.refresh()
        self._checksum = None

    def state(self, folder: Path | None = None, *, copy: bool = True) -> TrainerState:
        tensors = {name: tensor.detach().to("cpu", copy=copy) for name, tensor in self._tensors().items()}
        scalars: dict[str, int | float | str] = {
            "policy": self._current_checksum(),
            "reference": self._reference_checksum(),
            "micro_tokens": self._budget.tokens,
        }
        return TrainerState(tensors, scalars)

    def load_state(self, state: TrainerState) -> None:
        self._checksum = None
        check_state(state, self._algorithm, self._current_checksum(), self._reference_checksum())
        overwrite(self._tensors(), dict(state.tensors))  # reads files once
        for module in (*self._trained, *([] if self._reference is None else [self._reference])):
            module.refresh()
        # Continue with the saved budget: with a larger budget, losses would be summed in another order, and results
        # would differ in their last bits. A smaller budget in the settings replaces the saved budget.
        self._budget.tokens = min(int(state.scalars["micro_tokens"]), self._config.micro_tokens)

    def close(self) -> None:
        pass

    def _within_memory(self, blocks: Sequence[Block], work: Callable[[ModelSet], T]) -> T:
        def largest(tokens: int) -> int:
            _, micro_batches = plan_passes(blocks, tokens, self._models.sharing)
            return max(micro.padded_size for micro in micro_batches)

        return self._budget.run(
            lambda tokens: work(replace(self._models, micro_tokens=tokens)), largest, self._clear_gradients
        )

    def _clear_gradients(self) -> None:
        self._optimizer.clear_gradients()
        for trained in self._trained:
            trained.clear_gradients()

    def _current_checksum(self) -> str:
        if self._checksum is None:
            self._checksum = weights_checksum(self._policy.weights)
        return self._checksum

    def _reference_checksum(self) -> str:
        return "" if self._reference is None else weights_checksum(self._reference.weights)

    def _tensors(self) -> dict[str, Tensor]:
        reference = self._reference if self._algorithm.syncs_reference else None
        critic = None if self._critic is None else self._critic.weights
        return state_tensors(critic, None if reference is None else reference.weights, self._optimizer)


def check_models(algorithm: Algorithm, temperature: float, teacher: PreTrainedModel | None) -> None:
    """Raise InvalidInput if no trainer can train with these models or at this temperature."""
    if temperature <= 0:
        raise InvalidInput("temperature", got=temperature, do="train on samples drawn at a temperature above 0")
    if "teacher" in algorithm.needs and teacher is None:
        raise InvalidInput("teacher", got="none", do=f"name a model: {algorithm.name} learns from one")


def check_state(state: TrainerState, algorithm: Algorithm, policy: str, reference: str) -> None:
    """Raise InvalidInput if ``state`` belongs to other models. ``policy`` and ``reference`` are checksums."""
    if state.scalars["policy"] != policy:
        got, do = "a state saved with other weights", "load the model saved beside it first"
        raise InvalidInput("trainer state", got=got, do=do)
    if not algorithm.syncs_reference and state.scalars["reference"] != reference:
        do = "make the trainer of the model that the run began with, then load the saved weights into it"
        raise InvalidInput("trainer state", got="a state saved with another reference policy", do=do)


def state_tensors(critic: nn.Module | None, reference: nn.Module | None, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a trainer's state by name, without a copy."""
    tensors: dict[str, Tensor] = {}
    if critic is not None:
        tensors |= {f"critic.{name}": tensor for name, tensor in critic.named_parameters() if tensor.requires_grad}
    if reference is not None:
        tensors |= {f"reference.{name}": tensor for name, tensor in reference.named_parameters()}
    return {**tensors, **{f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()}}


def shares_prefixes(config: TrainerConfig, algorithm: Algorithm, models: Sequence[PreTrainedModel]) -> bool:
    """Return whether common prefixes are computed only once. Raise InvalidInput if they must be, but cannot."""
    if config.share_prefixes == "off" or config.ranks > 1:
        return False
    obstacle = _obstacle_to_sharing(config, algorithm, models)
    if config.share_prefixes == "auto":
        return obstacle is None and all(model.num_parameters() >= LARGE_MODEL for model in models)
    if obstacle is not None:
        raise InvalidInput("trainer.share_prefixes", got="on", do=f"leave it out: {obstacle}")
    return True


def _obstacle_to_sharing(config: TrainerConfig, algorithm: Algorithm, models: Sequence[PreTrainedModel]) -> str | None:
    if config.critic_reads_logprobs and "critic" in algorithm.needs:
        return "the critic reads log-probabilities, which differ between attempts with equal tokens"
    refused = [model for model in models if not supports_tree_mask(model)]
    if not refused:
        return None
    if has_vision(refused[0].config):
        return f"{type(refused[0]).__name__} gives tokens after an image positions that are not depths"
    if has_dynamic_rope(refused[0]):
        return f"{type(refused[0]).__name__} has position embeddings that depend on the length of the sequence"
    return f"{type(refused[0]).__name__} has windows or recurrent layers, or ignores the attention mask"


def describe_arithmetic(onednn: bool, sharing: PrefixSharing | None, dtype: Dtype) -> str:
    """Return the text of ``TrainerBackend.arithmetic``."""
    shared = "no shared prefixes"
    if sharing is not None:
        shared = f"prefixes shared {'by parts' if sharing.by_parts else 'under a mask'}"
    library = "oneDNN" if onednn else "PyTorch"
    precision = " in TF32" if product_precision(dtype) == "tf32" else ""
    return f"products by {library}{precision} and {shared}"


def make_reference(model: PreTrainedModel, algorithm: Algorithm, dtype: Dtype) -> MixedPrecision[PreTrainedModel]:
    """Return the reference policy: ``model`` without its adapter, or a copy, in float32 if it changes in the run."""
    if has_adapter(model):
        if algorithm.syncs_reference:
            do = "leave it out, or train all weights: with LoRA the reference is the model without its adapter"
            raise InvalidInput("algorithm.kl.sync_steps", got="a reference that follows an adapter", do=do)
        frozen = without_adapter(model)
        return MixedPrecision(frozen, frozen)
    frozen = copy.deepcopy(model).requires_grad_(False)
    if algorithm.syncs_reference:
        return mixed_precision(frozen, dtype)
    cast_parameters(frozen, dtype)
    return MixedPrecision(frozen, frozen)
