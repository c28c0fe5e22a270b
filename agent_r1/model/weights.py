"""The weights of models: matrix products, data types, mixed precision, activation checkpointing, and checksums.

By default, PyTorch multiplies float32 matrices on a CPU with MKL, which uses no AVX-512 on AMD processors. oneDNN, a
part of PyTorch, uses AVX-512, and is about twice as fast there. The results differ by rounding errors.

Shapes: N tokens (any leading dimensions), I inputs, O outputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.inference import Dtype, ProductPrecision
from agent_r1.model.adapter import copy_sharing_frozen
from agent_r1.model.float32_products import Float32Head, WideLinear, has_bfloat16_products

CPU_INFO = Path("/proc/cpuinfo")

SMALL_MODEL = 400_000
"""In models with fewer parameters, MKL computes all matrix products. oneDNN would save little time there."""


@cache
def is_onednn_faster() -> bool:
    """Whether oneDNN multiplies matrices faster than MKL: on AMD processors with AVX-512, if PyTorch offers it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    with suppress(AttributeError):  # the operator is not public: another version of PyTorch may not have it
        operator = torch.ops.mkldnn._linear_pointwise
        return operator is not None and CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text("utf-8", "replace")
    return False


def use_onednn(model: nn.Module) -> None:
    """Let oneDNN compute the products of float32 layers on a CPU, if it is faster and the model is not small."""
    if not is_onednn_faster() or sum(weight.numel() for weight in model.parameters()) < SMALL_MODEL:
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear


def has_onednn(model: nn.Module) -> bool:
    return any(type(module) is OneDnnLinear for module in model.modules())


def use_plain_products(model: nn.Module) -> None:
    """Undo :func:`use_onednn`."""
    for module in model.modules():
        if type(module) is OneDnnLinear:
            module.__class__ = cast(Any, nn.Linear)


class OneDnnLinear(nn.Linear):
    """A linear layer whose matrix product is computed by oneDNN.

    If inputs or weights are not in float32 on a CPU, or if autocast is on, PyTorch computes the product as usual.
    """

    def forward(self, states: Tensor) -> Tensor:
        weight = self.weight
        plain = states.dtype == weight.dtype == torch.float32 and states.device.type == weight.device.type == "cpu"
        # oneDNN has no product over no tokens; the layer may have been moved or converted
        if not plain or not states.numel() or torch.is_autocast_enabled("cpu"):
            return super().forward(states)
        product = cast(Tensor, cast(Any, _Product).apply(states, weight, self.bias))  # (padded N, O)
        rows = states.numel() // states.shape[-1]
        # not in _Product, because a view that it returned could not be changed in place, as some models do
        return (product if rows == len(product) else product[:rows]).view(*states.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    """The product x W^T + b of the states x (.., I) of N tokens, weights W (O, I) and an optional bias b (O,)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _multiply(pad_rows(states.reshape(-1, states.shape[-1])), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        flat = states.reshape(-1, states.shape[-1])  # (N, I)
        return (  # gradient: (padded N, O), with zeros after row N
            _multiply(gradient, weight.t(), None)[: len(flat)].view_as(states) if needs_states else None,
            _multiply(gradient.t(), pad_rows(flat).t(), None) if needs_weight else None,  # (O, padded N) (padded N, I)
            gradient[: len(flat)].sum(0) if needs_bias else None,
        )


def pad_rows(rows: Tensor) -> Tensor:
    missing = padded_length(len(rows)) - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def padded_length(rows: int) -> int:
    """Return ``rows``, rounded up to a multiple of 8; above 128, to a multiple of 16; above 256, of 32; and so on.

    oneDNN compiles a kernel for each shape, and never frees the kernel. Without padding, training SmolLM2-135M takes
    20 GB after 9 optimizer steps.
    """
    step = max(8, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], ""))


M = TypeVar("M", bound=nn.Module)

DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def product_precision(dtype: Dtype) -> ProductPrecision:
    """Return the precision in which this process multiplies matrices of type ``dtype``."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


def cast_parameters(module: M, dtype: Dtype, keep: Collection[str] = ()) -> M:
    """Cast the parameters of a module in place, except those of the direct submodules ``keep``.

    Buffers are not cast, because the frequencies of rotary embeddings must stay in float32.
    """
    for name, parameter in module.named_parameters():
        if name.partition(".")[0] not in keep:
            parameter.data = parameter.data.to(DTYPES[dtype])
    if dtype != "float32" and isinstance(module, PreTrainedModel):
        compute_float32_logits(module)
    if dtype != "float32":
        use_wide_products(module, keep)
    return module


def use_wide_products(module: nn.Module, keep: Collection[str] = ()) -> None:
    """Let layers with weights in bfloat16 multiply in float32, if this CPU has no products in bfloat16."""
    if not has_bfloat16_products():
        for name, layer in module.named_modules():
            if type(layer) is nn.Linear and name.partition(".")[0] not in keep:
                layer.__class__ = WideLinear


def compute_float32_logits(model: PreTrainedModel) -> None:
    """Make a plain output layer compute logits in float32 on a CPU, whatever the type of its weights.

    In bfloat16, logits between 16 and 32 would be rounded to multiples of 0.125. Sampler and trainer round differently,
    so they would disagree on the probabilities of sampled tokens (found by MiniMax-M1, arXiv 2506.13585).
    """
    head = model.get_output_embeddings()
    if type(head) in PLAIN_LINEAR:
        head.__class__ = Float32Head


PLAIN_LINEAR = (nn.Linear, OneDnnLinear, WideLinear)
"""Types of linear layers with a weight, perhaps a bias, and nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrecision(Generic[M]):
    """The optimizer changes ``weights``, and passes use ``compute``: ``weights`` itself, or a copy in lower precision.

    Weights change in float32, because rounding would undo small changes. A backward pass adds the gradient of the copy
    to that of ``weights``. Both share the memory of frozen weights that already have the lower precision.
    """

    weights: M
    compute: M

    def refresh(self) -> None:
        """Copy the weights to ``compute``, after each change."""
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
    """Return a module with a copy in ``dtype``, in which the direct submodules ``keep`` are not cast."""
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
    """Let layers keep only their inputs: the backward pass computes the rest again."""
    backbone = model if isinstance(model, PreTrainedModel) else next(model.children())  # the backbone of a critic
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not isinstance(backbone, PreTrainedModel) or not layers:
        do = "leave it out: transformers cannot checkpoint the layers of this architecture"
        raise InvalidInput("trainer.activation_checkpointing", got=name, do=do)
    backbone.activation_checkpointing_enable()
    for layer in layers:
        layer.training = True  # checkpointing needs it; modules inside a layer stay in eval mode


def weights_checksum(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """Return the sha256 of names, types, shapes and bytes of all parameters, converted to ``dtype`` if it is given."""
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
    """Return ``name``; for "auto", a GPU if there is one, otherwise the CPU."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return name


def set_product_precision(device: str, tf32: bool) -> None:
    """Set whether float32 matrices are multiplied in TF32, with 11 instead of 24 significant bits."""
    uses_tf32 = tf32 and device.startswith("cuda")
    if uses_tf32 and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32:
        raise InvalidInput("tf32", got="true", do="leave it out: this GPU has no TF32")
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")


ROWS = "rows"
"""A key in the header of a file of tensors, of which other files hold more rows. Its value is JSON: {name: [the index
of the file's first row in the whole tensor, the number of rows of the whole tensor]}."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some successive rows of a tensor."""

    tensor: Tensor
    first: int  # the index of the first of these rows in the whole tensor
    total: int  # the number of rows of the whole tensor


def write_rows(path: Path, divided: Mapping[str, Rows], whole: Mapping[str, Tensor]) -> None:
    """Write ``divided`` (rows of tensors that several files share) and ``whole`` tensors to one safetensors file."""
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
    """A mapping from names to the tensors in ``files``. A tensor is read each time it is looked up."""

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
