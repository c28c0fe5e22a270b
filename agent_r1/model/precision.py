"""Data types of weights, and modules that compute in another one than their weights are kept in."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.core.errors import InvalidInput
from agent_r1.core.weights import Dtype

M = TypeVar("M", bound=nn.Module)

DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cast_parameters(module: M, dtype: Dtype, keep: Collection[str] = ()) -> M:
    """Cast the parameters of a module in place, and return it.

    Buffers keep their type: the frequencies of rotary embeddings must stay in float32. So do the parameters whose name
    begins with a submodule of ``keep``. Tied parameters stay tied.
    """
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] not in keep:
            parameter.data = parameter.data.to(DTYPES[dtype])
    return module


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrecision(Generic[M]):
    """A module whose weights are kept in float32, and the module that computes for it.

    ``compute`` is a copy of lower precision, or ``weights`` itself. The gradient of each backward pass of the copy is
    added to the gradient of ``weights`` in float32, so nothing is lost over micro-batches and optimizer steps.
    """

    weights: M
    compute: M

    def refresh(self) -> None:
        """Copy the weights to the module that computes. Call it after they changed."""
        if self.compute is self.weights:
            return
        with torch.no_grad():
            for weight, own in zip(self.weights.parameters(), self.compute.parameters(), strict=True):
                own.copy_(weight)

    def clear_gradients(self) -> None:
        """Set the gradients of the module that computes to None; an interrupted backward pass leaves some."""
        self.compute.zero_grad(set_to_none=True)


def mixed_precision(weights: M, dtype: Dtype, keep: Collection[str] = ()) -> MixedPrecision[M]:
    """Return a module that computes in ``dtype``; its submodules in ``keep`` compute in float32."""
    if dtype == "float32":
        return MixedPrecision(weights, weights)
    compute = cast_parameters(copy.deepcopy(weights), dtype, keep)
    for weight, own in zip(weights.parameters(), compute.parameters(), strict=True):
        if own.requires_grad:
            own.register_post_accumulate_grad_hook(_hand_over_to(weight))
    return MixedPrecision(weights, compute)


def _hand_over_to(weight: nn.Parameter):  # type: ignore[no-untyped-def]
    """Return a hook that adds a parameter's gradient to that of ``weight``, in its type, and frees it."""

    def hand_over(own: torch.Tensor) -> None:
        assert own.grad is not None
        gradient, own.grad = own.grad.to(weight.dtype), None
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    return hand_over


def checkpoint_activations(model: nn.Module, name: str) -> None:
    """Let the layers of a model keep only their inputs in the forward pass, and compute the rest again when needed.

    Raises InvalidInput, which names the model, if its architecture does not support it.
    """
    backbone = model if isinstance(model, PreTrainedModel) else next(model.children())  # a critic's backbone
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not isinstance(backbone, PreTrainedModel) or not layers:
        do = "leave it out: transformers cannot checkpoint the layers of this architecture"
        raise InvalidInput("trainer.activation_checkpointing", got=name, do=do)
    backbone.activation_checkpointing_enable()
    for layer in layers:
        layer.training = True  # transformers checkpoints in training only. The modules inside stay in eval mode.
