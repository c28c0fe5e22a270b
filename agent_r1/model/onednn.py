"""Linear layers whose matrix products are computed by oneDNN, on processors on which it is faster than MKL.

By default, PyTorch multiplies float32 matrices on a CPU with MKL, which uses no AVX-512 on AMD processors. oneDNN, a
part of PyTorch, uses AVX-512, and is about twice as fast there. The results differ by rounding errors.

Shapes: N tokens (any leading dimensions), I inputs, O outputs.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

CPU_INFO = Path("/proc/cpuinfo")

SMALL_MODEL = 400_000
"""In models with fewer parameters, MKL computes all matrix products. oneDNN would save little time there."""


@cache
def is_onednn_faster() -> bool:
    """Return True on an AMD processor with AVX-512, on which oneDNN multiplies matrices faster than MKL.

    Return False on other processors, or if this version of PyTorch does not offer oneDNN.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    with suppress(AttributeError):  # the operator is not public: another version of PyTorch may not have it
        operator = torch.ops.mkldnn._linear_pointwise
        return operator is not None and CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text("utf-8", "replace")
    return False


def use_onednn(model: nn.Module) -> None:
    """Let oneDNN compute the products of the model's linear layers, forward and backward, if oneDNN is faster.

    Only layers in float32 on a CPU change, and only in models with at least ``SMALL_MODEL`` parameters.
    """
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


PLAIN_LINEAR = (nn.Linear, OneDnnLinear)
"""Types of linear layers with a weight, perhaps a bias, and nothing else."""


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
