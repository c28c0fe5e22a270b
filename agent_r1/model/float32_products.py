"""Layers with weights in bfloat16 that multiply in float32 on a CPU.

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@cache
def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies matrices in bfloat16 on this CPU. PyTorch's own products are 6 times as slow as those
    in float32.
    """
    with suppress(AttributeError):  # the operator is not public
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False


PART_WEIGHTS = 1 << 19  # weights that are converted at once: 2 MiB, which fit into a processor's cache


class Float32Head(nn.Linear):
    """A linear layer that computes in float32 on a CPU, whatever the data types of its weights and inputs are.

    On a GPU, the layer computes like an ordinary linear layer: float32 may be slow there, which was not measured.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits (.., V) of hidden states (.., H): one logit for each of the V tokens of the vocabulary."""
        if states.device.type != "cpu":
            return super().forward(states)
        return _float32_outputs(states, self.weight, self.bias)


class WideLinear(nn.Linear):
    """A linear layer that computes its products in float32 on a CPU, and rounds the results to the type of its inputs.

    Kernels for bfloat16 add in float32 too, so results differ by rounding errors only.
    """

    def forward(self, states: Tensor) -> Tensor:
        if states.device.type != "cpu" or states.dtype == torch.float32:
            return super().forward(states)
        return _float32_outputs(states, self.weight, self.bias).to(states.dtype)


def _float32_outputs(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = states.reshape(-1, states.shape[-1])  # (N, I)
    outputs = cast(Tensor, cast(Any, _Float32Product).apply(flat, weight))
    outputs = outputs if bias is None else outputs + bias.float()
    return outputs.view(*states.shape[:-1], len(weight))


class _Float32Product(torch.autograd.Function):
    """The product x W^T in float32 of the states x (N, I) and the weights W (O, I), without a copy of all weights.

    A decode step has few states, so that most of its time would be the copy. In an update, the copy and its gradient
    of a head would be the largest tensors: each has 0.5 GiB for a vocabulary of 152,000 tokens and a width of 896.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        wide = states.float()
        outputs = wide.new_empty(len(states), len(weight))
        for part in _weight_parts(weight):
            torch.mm(wide, weight[part].float().t(), out=outputs[:, part])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors  # gradient: (N, O)
        needs_states, needs_weight = ctx.needs_input_grad
        wide = states.float()
        of_states = torch.zeros_like(wide) if needs_states else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        for part in _weight_parts(weight):
            columns = gradient[:, part]
            if of_states is not None:
                of_states.addmm_(columns, weight[part].float())
            if of_weight is not None:
                of_weight[part] = columns.t() @ wide
        return None if of_states is None else of_states.to(states.dtype), of_weight


def _weight_parts(weight: Tensor) -> list[slice]:
    count = max(1, PART_WEIGHTS // weight.shape[1])
    parts = [slice(first, first + count) for first in range(0, len(weight), count)]
    return parts[:1] if isinstance(weight, FakeTensor) else parts  # all parts need the same memory
