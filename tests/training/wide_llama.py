"""Models that vLLM runs on a CPU: Llamas with heads of 32, which is the least that its kernels accept."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

WIDTH = 32


def as_wide_llama(model: PreTrainedModel) -> LlamaForCausalLM:
    """Return a Llama with heads of at least 32 that computes the same as ``model``, a Llama of another type.

    A wider head has zeros in its new places. They stay zeros in training: a query's zero meets a key's zero, and a
    value's zero meets one of the output projection, so that their gradients are zero. Queries and keys go to the places
    where RoPE turns them as before, and queries grow, because attention divides by the root of the width. The output
    projection may get biases of zero, which are trained.
    """
    old = model.config.to_dict()
    width, factor = old["head_dim"], max(1, WIDTH // old["head_dim"])
    known = {name: value for name, value in old.items() if name in LlamaConfig().to_dict()}
    llama = LlamaForCausalLM(LlamaConfig(**{**known, "model_type": "llama", "head_dim": width * factor})).eval()
    half = torch.arange(width // 2) * factor  # RoPE turns the pair (i, i + d / 2) by theta^(-2 i / d)
    rotated, plain = torch.cat([half, half + width * factor // 2]), torch.arange(width)

    def widen(rows: Tensor, places: Tensor) -> Tensor:
        """Return rows (heads * width, ..) as (heads * width * factor, ..), with the rows of a head at ``places``."""
        heads = rows.unflatten(0, (-1, width))
        result = torch.zeros(len(heads), width * factor, *rows.shape[1:])
        result[:, places] = heads
        return result.flatten(0, 1)

    weights = model.state_dict()
    for name, weight in weights.items():
        kind = name.rpartition(".self_attn.")[2].partition(".")[0]
        if kind == "q_proj":
            weights[name] = widen(weight, rotated) * factor**0.5
        elif kind == "k_proj":
            weights[name] = widen(weight, rotated)
        elif kind == "v_proj":
            weights[name] = widen(weight, plain)
        elif kind == "o_proj":
            weights[name] = widen(weight.t(), plain).t().contiguous()
    new = {name: torch.zeros_like(tensor) for name, tensor in llama.state_dict().items() if name not in weights}
    assert all(name.endswith("o_proj.bias") for name in new)
    llama.load_state_dict({**weights, **new})
    return llama
