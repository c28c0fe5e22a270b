"""LoRA adapters (arXiv:2106.09685), made by peft: low-rank matrices that are trained while the model itself is frozen.

An adapted layer computes x W + (alpha / rank) (x A) B. W (d, e) is frozen, A (d, rank) is random, and B (rank, e) is 0
at the beginning. A and B are stored transposed, as usual in torch.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.model.config import ALL_LINEAR, LoraConfig
from agent_r1.model.float32_products import WideLinear

M = TypeVar("M", bound=nn.Module)

ADAPTER = "default"
"""peft's name of the adapter in a model."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of the files of an adapter in peft's format: its settings and its weights."""

_LINEAR = (nn.Linear, Conv1D)
_MATRICES = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
_SAVED_PREFIX = "base_model.model."


def add_adapter(model: PreTrainedModel, config: LoraConfig, *, seed: int, base: str) -> PreTrainedModel:
    """Add a new adapter in place, freeze all other weights, and return the model. Its outputs do not change yet.

    ``base`` is the model without the adapter, as saved files of the adapter will name it.
    """
    peft = import_extra("peft", "lora")
    is_all = config.target_modules == (ALL_LINEAR,)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=ALL_LINEAR if is_all else list(config.target_modules),
        lora_dropout=0.0,  # with dropout, trainer and engine would compute different probabilities
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _inject(model, lora)
    except ValueError as error:
        raise _bad_targets(model, config) from error
    adapted = dict(adapted_layers(model))
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    linear = [layer for layer in adapted.values() if layer not in ends and isinstance(layer.base_layer, _LINEAR)]
    targets = {name.rpartition(".")[2] for name in adapted} if is_all else set(config.target_modules)
    matches_all = all(any(f".{name}".endswith(f".{target}") for name in adapted) for target in targets)
    if not linear or len(linear) < len(adapted) or not matches_all:
        raise _bad_targets(model, config)
    lora.target_modules = sorted(targets)  # peft's set of names has another order in each process
    return model


def load_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter in ``folder`` to the model in place, freeze all other weights, and return the model."""
    peft = import_extra("peft", "lora")
    try:
        lora = peft.PeftConfig.from_pretrained(str(folder))
        lora.inference_mode = False
        _inject(model, lora)
        load_trained_weights(model, read_adapter(folder, model))
    except InvalidInput:
        raise
    except Exception as error:  # for a broken folder, peft, safetensors and json raise many types of errors
        lines = str(error).strip().splitlines()[:1]
        do = f"name a LoRA adapter of this model without further weights; this one fails with: {lines}"
        raise InvalidInput("adapter", got=folder, do=do) from error
    return model


def base_of(folder: Path) -> str | None:
    """Return the base model that the adapter in ``folder`` names; None if there is no adapter."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text("utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    if not isinstance(base, str) or not base:
        do = f"add base_model_name_or_path to {ADAPTER_CONFIG}: the model that the adapter belongs to"
        raise InvalidInput("adapter", got=folder, do=do)
    return base


def has_adapter(model: nn.Module) -> bool:
    return any(_is_matrix(name) for name, _ in model.named_parameters())


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that training changes, by parameter name such as ``lm_head.weight``, without copying them."""
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if _is_matrix(name)} if has_adapter(model) else state


def load_trained_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a result of :func:`trained_weights` into the model. Raise RuntimeError if names or shapes differ."""
    if not has_adapter(model):
        model.load_state_dict(dict(weights))
        return
    own = trained_weights(model)
    if own.keys() != weights.keys():
        raise RuntimeError(f"the weights belong to another adapter: {sorted(own.keys() ^ weights.keys())[0]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def count_adapter(model: nn.Module) -> int:
    """Return the number of weights of the adapter; 0 without an adapter."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if _is_matrix(name))


def adapter_rank(model: nn.Module) -> int:
    """Return the largest rank of the adapter's matrices; 0 without an adapter."""
    return max((len(tensor) for name, tensor in model.named_parameters() if name.endswith(_MATRICES[0])), default=0)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer (peft's) for each layer that has an adapter."""
    if has_adapter(model):
        layer_type = import_extra("peft.tuners.lora", "lora").LoraLayer
        yield from ((name, layer) for name, layer in list(model.named_modules()) if isinstance(layer, layer_type))


def low_rank_matrices(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A (rank, d) and (alpha / rank) B (e, rank) of an adapted layer, transposed and in float32."""
    a, b = (part[ADAPTER].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
    return a, layer.scaling[ADAPTER] * b


def copy_sharing_frozen(module: M) -> M:
    """Return a copy of a module. The module and its copy share the memory of frozen parameters."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in module.parameters()
        if not parameter.requires_grad
    }
    return copy.deepcopy(module, shared)


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model before training: a copy without adapter, which shares frozen weights."""
    plain = copy_sharing_frozen(model)
    for name, layer in adapted_layers(plain):
        plain.set_submodule(name, layer.base_layer)
    vars(plain).pop("peft_config", None)  # the settings of the adapter
    return plain


@torch.no_grad()
def merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model in which the adapter is merged into the weights: W + (alpha / rank) A B replaces W.

    All weights of lower precision than float32 are converted to float32. Merged weights in bfloat16 would lose most of
    A B by rounding. The copy and the model share the memory of frozen weights that are neither merged nor converted.
    """
    merged = without_adapter(model)
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for name, layer in adapted_layers(model):
        weight = merged.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        weight.data = weight.data + layer.get_delta_weight(ADAPTER)
    return merged


def save_weights(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write a result of :func:`trained_weights`: an adapter in the format of peft, a model in that of transformers."""
    if not has_adapter(model):
        model.save_pretrained(folder, state_dict=dict(weights))
        return
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(str(folder))
    save_file({_saved_name(name): tensor.contiguous() for name, tensor in weights.items()}, folder / ADAPTER_WEIGHTS)


def read_adapter(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of an adapter, by their names in ``model``. Raise ValueError if the names do not match."""
    saved = load_file(folder / ADAPTER_WEIGHTS)
    names = {_saved_name(name): name for name in trained_weights(model)}
    if names.keys() != saved.keys():
        raise ValueError(f"its weights and its settings differ: {sorted(names.keys() ^ saved.keys())[0]}")
    return {names[name]: tensor for name, tensor in saved.items()}


def _inject(model: PreTrainedModel, lora: Any) -> None:
    peft = import_extra("peft", "lora")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft notes that layers of GPT-2 are transposed
        peft.inject_adapter_in_model(lora, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        if _is_matrix(name):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for name, layer in adapted_layers(model):
        if layer.lora_variant:
            raise ValueError(f"a variant of LoRA in {name}")
        layer.forward = partial(_forward, layer)
    model.eval()


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    outputs = layer.base_layer(inputs)
    if isinstance(layer.lora_A[ADAPTER], WideLinear):
        low_rank = layer.lora_B[ADAPTER](layer.lora_A[ADAPTER](inputs))
        return torch.add(outputs, low_rank, alpha=layer.scaling[ADAPTER])
    a, b = (part[ADAPTER].weight.to(inputs.dtype).t() for part in (layer.lora_A, layer.lora_B))  # (d, rank), (rank, e)
    low_rank = inputs.reshape(-1, inputs.shape[-1]) @ a  # (N, rank)
    flat = outputs.reshape(-1, outputs.shape[-1])  # (N, e)
    return torch.addmm(flat, low_rank, b, alpha=layer.scaling[ADAPTER]).view_as(outputs)


def _bad_targets(model: PreTrainedModel, config: LoraConfig) -> InvalidInput:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = [module for end in ends if end is not None for module in end.modules()]
    linear = [name for name, one in model.named_modules() if isinstance(one, _LINEAR) and one not in outside]
    # a layer that already has its adapter is called base_layer inside it
    known = sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name in linear if "lora_" not in name})
    do = f"name linear layers of the model ({', '.join(known)}), or {ALL_LINEAR}"
    return InvalidInput("trainer.lora.target_modules", got=", ".join(config.target_modules), do=do)


def _is_matrix(name: str) -> bool:
    return name.endswith(_MATRICES)


def _saved_name(name: str) -> str:
    return _SAVED_PREFIX + name.replace(f".{ADAPTER}.", ".")
