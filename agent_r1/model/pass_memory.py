"""The memory of forward and backward passes. The passes run on fake tensors, which have a shape but no data."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from agent_r1.core.inference import Dtype
from agent_r1.model.adapter import add_adapter, count_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.model.forward import backbone_of, hidden_states, token_scores
from agent_r1.model.load import quiet_transformers
from agent_r1.model.vision import text_decoder
from agent_r1.model.weights import cast_parameters, checkpoint_activations

PROBE_TOKENS = 16
NO_ADAPTER = LoraConfig()


@dataclass(frozen=True, slots=True)
class PassShape:
    """A forward and backward pass over sequences of equal length."""

    model_type: type[PreTrainedModel]
    settings: str  # the model's configuration as JSON
    lora: LoraConfig  # the adapter that the pass trains; with rank 0, all weights are trained
    dtype: Dtype
    device: str
    checkpointing: bool  # whether activation checkpointing is on
    with_critic: bool  # whether the pass also trains a critic, which has the size of the model
    with_mask: bool  # whether sequences can hold branches with a common prefix, so that attention needs a mask
    rows: int  # the number of sequences
    length: int  # the number of tokens in each sequence


@lru_cache(maxsize=64)
def pass_bytes(shape: PassShape) -> int:
    """Return the peak memory of a pass in bytes, without weights and their gradients."""
    with FakeTensorMode(), torch.device(shape.device):
        made = (shape.model_type, shape.settings, shape.dtype, shape.lora)
        models = [_fake_model(*made) for _ in range(1 + shape.with_critic)]
        for model in models:
            if shape.checkpointing:
                checkpoint_activations(model, shape.model_type.__name__)
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        ids = torch.zeros((shape.rows, shape.length), dtype=torch.long)
        with _AliveBytes() as alive:
            hidden, *critic = [_states(backbone_of(model), ids, shape.with_mask) for model in models]
            actions = hidden.flatten(0, 1)[torch.arange(ids.numel())]
            loss = token_scores(models[0], actions, ids.flatten(), 1.0)[0].sum()
            for states in critic:  # the sum stands for the critic's values, which are weighted sums of hidden states
                loss = loss + states.float().sum()
            loss.backward()
    return alive.peak


def _states(backbone: PreTrainedModel, ids: Tensor, with_mask: bool) -> Tensor:
    if with_mask:
        return hidden_states(backbone, ids, ids, torch.full(ids.shape, ids.shape[1]))
    # For tensors without data, transformers would allocate a causal mask that a real pass does not need. This mask
    # prevents the allocation, and itself needs almost no memory.
    dtype = next(backbone.parameters()).dtype
    mask = torch.zeros((1, 1, 1, 1), dtype=dtype).expand(ids.shape[0], 1, ids.shape[1], ids.shape[1])
    return text_decoder(backbone)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


@lru_cache(maxsize=64)
def _adapter_weights(model_type: type[PreTrainedModel], settings: str, lora: LoraConfig) -> int:
    with FakeTensorMode():
        return count_adapter(_fake_model(model_type, settings, "float32", lora))


def adapter_weights(model: PreTrainedModel, lora: LoraConfig) -> int:
    return _adapter_weights(type(model), settings_of(model), lora)  # type: ignore[arg-type]


def settings_of(model: PreTrainedModel) -> str:
    return json.dumps(model.config.to_dict(), default=str, sort_keys=True)


def kv_bytes_per_token(model: PreTrainedModel, dtype: Dtype) -> int:
    return _kv_bytes(type(model), settings_of(model), dtype)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _kv_bytes(model_type: type[PreTrainedModel], settings: str, dtype: Dtype) -> int:
    with FakeTensorMode(), torch.no_grad():
        model = _fake_model(model_type, settings, dtype)
        ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // PROBE_TOKENS


def _fake_model(
    model_type: type[PreTrainedModel], settings: str, dtype: Dtype, lora: LoraConfig = NO_ADAPTER
) -> PreTrainedModel:
    values: Mapping[str, Any] = json.loads(settings)
    with quiet_transformers():
        config = model_type.config_class.from_dict(dict(values))  # type: ignore[union-attr]
        model = model_type(config).eval()
        if lora.rank:
            _add_fake_adapter(model, lora)
        return cast_parameters(model, dtype)


def _add_fake_adapter(model: PreTrainedModel, lora: LoraConfig) -> None:
    with torch.device("meta"):  # peft moves matrices on other devices, which fails for tensors without data
        add_adapter(model, lora, seed=0, base="")
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "meta":
            layer.weight = nn.Parameter(torch.empty(layer.weight.shape))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _AliveBytes(TorchDispatchMode):
    """A counter of the bytes of living tensors, from the operation that makes a tensor until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, int] = {}  # number of bytes by the id() of the storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._alive:
            self._alive[id(storage)] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        self._now -= self._alive.pop(key)
