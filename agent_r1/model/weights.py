"""The weights of models: data types, mixed precision, activation checkpointing, and checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.inference import Dtype, ProductPrecision
from agent_r1.model.adapter import copy_sharing_frozen
from agent_r1.model.onednn import PLAIN_LINEAR

M = TypeVar("M", bound=nn.Module)

DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def product_precision(dtype: Dtype) -> ProductPrecision:
    """Return the precision in which this process multiplies matrices of type ``dtype``."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


def cast_parameters(module: M, dtype: Dtype, keep: Collection[str] = ()) -> M:
    """Cast the parameters of a module to ``dtype`` in place, and return the module.

    The direct submodules named in ``keep`` are not cast. Buffers are not cast either, because the frequencies of
    rotary embeddings are buffers, and must stay in float32. If ``dtype`` is bfloat16 and ``module`` is a language
    model, :func:`compute_float32_logits` is applied to the model.
    """
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] not in keep:
            parameter.data = parameter.data.to(DTYPES[dtype])
    if dtype != "float32" and isinstance(module, PreTrainedModel):
        compute_float32_logits(module)
    return module


def compute_float32_logits(model: PreTrainedModel) -> None:
    """Make the output layer of ``model`` compute logits in float32 while the model is on a CPU.

    The weights of the layer keep their data type, and are converted during the computation. On a GPU, the layer
    computes as before: float32 may be slow there, which was not measured. An output layer that is not a plain linear
    layer is not changed.

    In bfloat16, logits between 16 and 32 would be rounded to multiples of 0.125. Sampler and trainer round differently,
    so they would disagree on the probabilities of sampled tokens (found by MiniMax-M1, arXiv 2506.13585).
    """
    head = model.get_output_embeddings()
    if type(head) in PLAIN_LINEAR:
        head.__class__ = Float32Head


PART_WEIGHTS = 1 << 19
"""The approximate number of weights that :class:`Float32Head` converts to float32 at once.

In float32, this number of weights takes 2 MiB, which fits into the cache of a processor.
"""


class Float32Head(nn.Linear):
    """A linear layer that computes in float32 on a CPU, whatever the data types of its weights and inputs are.

    On a GPU, the layer computes like an ordinary linear layer: float32 may be slow there, which was not measured.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits (.., V) of hidden states (.., H): one logit for each of the V tokens of the vocabulary."""
        if states.device.type != "cpu":
            return super().forward(states)
        bias = None if self.bias is None else self.bias.float()
        if torch.is_grad_enabled():
            return linear(states.float(), self.weight.float(), bias)
        wide = states.float()  # a decode step has few states: most of its time would be the copy of all weights
        logits = wide.new_empty(*states.shape[:-1], len(self.weight))
        count = max(1, PART_WEIGHTS // self.weight.shape[1])
        for first in range(0, len(self.weight), count):
            part = slice(first, first + count)
            logits[..., part] = linear(wide, self.weight[part].float(), None if bias is None else bias[part])
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrecision(Generic[M]):
    """A pair of modules: the optimizer changes ``weights``, and forward and backward passes use ``compute``.

    ``compute`` is either ``weights`` itself, or a copy of ``weights`` in lower precision. The optimizer changes the
    weights in float32, because rounding to lower precision would undo small changes. If ``compute`` is a copy, each
    backward pass adds the gradient of the copy to the float32 gradient of ``weights``. Both modules share the memory of
    frozen weights that already have the lower precision.
    """

    weights: M
    compute: M

    def refresh(self) -> None:
        """Copy the parameters of ``self.weights`` to ``self.compute``.

        Call this method after each change of the weights.
        """
        if self.compute is self.weights:
            return
        with torch.no_grad():
            for weight, own in zip(self.weights.parameters(), self.compute.parameters(), strict=True):
                if own.data_ptr() != weight.data_ptr():
                    own.copy_(weight)

    def clear_gradients(self) -> None:
        """Set every gradient of ``self.compute`` to None. Call this method after an interrupted backward pass."""
        self.compute.zero_grad(set_to_none=True)


def mixed_precision(weights: M, dtype: Dtype, keep: Collection[str] = ()) -> MixedPrecision[M]:
    """Return the module ``weights`` and a copy in the data type ``dtype``. Forward and backward passes use the copy.

    In the copy, the direct submodules named in ``keep`` stay in their own data types. For float32, no copy is made, and
    the passes use ``weights`` itself.
    """
    if dtype == "float32":
        return MixedPrecision(weights, weights)
    compute = cast_parameters(copy_sharing_frozen(weights), dtype, keep)
    for weight, own in zip(weights.parameters(), compute.parameters(), strict=True):
        if own.requires_grad:
            own.register_post_accumulate_grad_hook(_hand_over_to(weight))
    return MixedPrecision(weights, compute)


def _hand_over_to(weight: nn.Parameter):  # type: ignore[no-untyped-def]
    def hand_over(own: Tensor) -> None:
        assert own.grad is not None
        gradient, own.grad = own.grad.to(weight.dtype), None
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    return hand_over


def checkpoint_activations(model: nn.Module, name: str) -> None:
    """Switch on activation checkpointing: layers keep only their inputs, and the backward pass computes the rest again.

    Raise InvalidInput if the architecture of the model does not support activation checkpointing. ``name`` is the name
    of the model in the error message.
    """
    backbone = model if isinstance(model, PreTrainedModel) else next(model.children())  # the backbone of a critic
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not isinstance(backbone, PreTrainedModel) or not layers:
        do = "leave it out: transformers cannot checkpoint the layers of this architecture"
        raise InvalidInput("trainer.activation_checkpointing", got=name, do=do)
    backbone.activation_checkpointing_enable()
    for layer in layers:
        layer.training = True  # checkpointing needs it; modules inside a layer stay in eval mode


def weights_checksum(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """Return the sha256, in hexadecimal digits, of the names, types, shapes and bytes of all parameters.

    If ``dtype`` is given, the parameters are first converted to this data type. One CPU core takes about 1 ms per MB.
    """
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return tensors_checksum((name, weight.to(dtype or weight.dtype)) for name, weight in weights)


def tensors_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the checksum of pairs (name, tensor), computed as in :func:`weights_checksum`."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors):
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


FIRST_WITH_TF32 = (8, 0)
"""The compute capability of the first NVIDIA GPUs with TF32 (Ampere)."""


def choose_device(name: str) -> str:
    """Return ``name``, a torch device. If ``name`` is "auto", return a GPU if there is one, otherwise the CPU.
    Raise InvalidInput if ``name`` is a GPU and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return name


def set_product_precision(device: str, tf32: bool) -> None:
    """Set whether this process multiplies float32 matrices in TF32 or in float32.

    In TF32, the inputs of a product have 11 instead of 24 significant bits.
    """
    uses_tf32 = tf32 and device.startswith("cuda")
    if uses_tf32 and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32:
        raise InvalidInput("tf32", got="true", do="leave it out: this GPU has no TF32")
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")


ROWS = "rows"
"""A key in the header of a tensor file. The JSON value of the key is {"name of a tensor": [first, total]}, with one
entry for each tensor that is divided among several files. The file holds successive rows of the divided tensor. The
number ``first`` is the index that the first row in the file has in the whole tensor. The number ``total`` is the number
of rows of the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some successive rows of a tensor."""

    tensor: Tensor
    first: int  # the index of the first of these rows in the whole tensor
    total: int  # the number of rows of the whole tensor


def write_rows(path: Path, divided: Mapping[str, Rows], whole: Mapping[str, Tensor]) -> None:
    """Write tensors to one safetensors file. Raise AgentR1Error if the file cannot be written.

    Args:
        divided: {name: rows for this file} of each tensor that is divided among several files.
        whole: {name: tensor} of each complete tensor.
    """
    header = json.dumps({name: [rows.first, rows.total] for name, rows in divided.items()})
    tensors = {**whole, **{name: rows.tensor for name, rows in divided.items()}}
    try:
        save_file({name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}, path, {ROWS: header})
    except (OSError, SafetensorError) as error:
        raise AgentR1Error(f"{path} could not be written: {error}") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a tensor that one file contains: some successive rows."""

    file: Path
    first: int  # the index of the part's first row in the whole tensor
    total: int  # the number of rows of the whole tensor
    shape: tuple[int, ...]  # the shape of the part


class TensorFiles(Mapping[str, Tensor]):
    """A mapping from names to the tensors in ``files``. A tensor is read each time it is looked up.

    Raise SafetensorError or OSError if a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._parts: dict[str, list[_Part]] = {}
        for file in self.files:
            with safe_open(file, "pt") as opened:
                divided = json.loads((opened.metadata() or {}).get(ROWS, "{}"))
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    shape = tuple(opened.get_slice(name).get_shape())
                    first, total = divided.get(name, (0, shape[0] if shape else 1))
                    self._parts.setdefault(name, []).append(_Part(file, first, total, shape))

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name][0]
        if part.shape:
            return self.rows(name, 0, part.total)
        with safe_open(part.file, "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor ``name``."""
        part = self._parts[name][0]
        return (part.total, *part.shape[1:]) if part.shape else ()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found = []
        for part in sorted(self._parts[name], key=lambda part: part.first):
            begin = min(max(start - part.first, 0), part.shape[0])
            end = min(max(stop - part.first, begin), part.shape[0])
            with safe_open(part.file, "pt") as opened:
                found.append(opened.get_slice(name)[begin:end])
        rows: Tensor = torch.cat(found)
        return rows
