"""A decode step of Llama-like models, written as one function of tensors.

:class:`LlamaDecoder` computes the same operations as the transformers model, in the same order and on the same weights.
But the transformers model calls about twenty modules per layer, and the decoder calls none. In a small model, calls of
modules take longer than the arithmetic.

The KV cache consists of blocks. A block has R rows, and each row holds one sequence. A decode step of all rows of a
block gives the same bits as the transformers model. A decode step of some rows (:meth:`LlamaDecoder.decode_rows`)
differs by rounding errors. In both kinds of steps, the bits of a row do not depend on the content of the other rows.

Shapes: R rows of a block, E hidden size, K key-value heads, H attention heads, G = H / K, D head size, L visible tokens
(the tokens of a row to which the new token may attend).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agent_r1.inference.kv_cache import CacheBlock, round_up, weighted_values
from agent_r1.model.onednn import PLAIN_LINEAR

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM")
"""Names of the model classes whose layers have the modules and the order of operations of Llama."""

ROWS_MULTIPLE = 16
""":meth:`LlamaDecoder.decode_rows` pads the number of rows to a multiple of this number. Otherwise, BLAS libraries
would use different kernels for different numbers of rows, and the bits of a row would depend on the number of rows."""

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A function that computes the attention of one layer for N new tokens.

Let H be the number of attention heads, K the number of key-value heads, and D the head size. The arguments are (index
of the layer, queries (N, H, D), keys (N, K, D), values (N, K, D)). The function appends the keys and values to the KV
cache of the layer, and returns the output (N, H * D).
"""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The modules of one decoder layer, shared with the model.

    ``query_norm`` and ``key_norm`` are None if the model does not normalize queries and keys.
    """

    input_norm: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    mlp_norm: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_size: int
    scaling: float

    def linears(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


class LlamaDecoder:
    """The decode step of a Llama-like model. Make an instance with ``LlamaDecoder.of(model)``."""

    def __init__(self, model: PreTrainedModel) -> None:
        backbone: Any = model.base_model
        self.embedding = backbone.embed_tokens
        self.rotary = backbone.rotary_emb
        self.norm = backbone.norm
        self.layers = [_layer(module) for module in backbone.layers]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LlamaDecoder | None:
        """Return a decoder for ``model``, or None if the model is not supported.

        A model is supported if its class is in ``LLAMA_LIKE``, its activation is SiLU, and the model has no sliding
        window, no quantization and no adapter.
        """
        config = model.config
        layer_types = getattr(config, "layer_types", None) or ()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if type(model).__name__ not in LLAMA_LIKE or config.hidden_act != "silu":
            return None
        if window is not None or any(layer_type != "full_attention" for layer_type in layer_types):
            return None
        decoder = cls(model)
        plain = all(type(linear) in PLAIN_LINEAR for layer in decoder.layers for linear in layer.linears())
        return decoder if plain else None

    def __call__(self, token_ids: Tensor, block: CacheBlock, mask: Tensor) -> Tensor:
        """Append one token to each of the R rows of ``block``. Return the last hidden states.

        The hidden states have the shape (R, E), with the hidden size E. ``token_ids`` (R,) holds the new tokens.
        ``mask`` (R, 1, 1, L) is added to the attention scores. The attention reads the first L tokens of each row,
        where L is the last dimension of ``mask``. The caller has to increase ``block.lengths``.
        """
        rows, visible = torch.arange(block.rows, device=token_ids.device), mask.shape[-1]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = block.layer(index, key[:, :, None])  # (R, K, capacity, D)
            keys[rows, :, block.lengths] = key
            values[rows, :, block.lengths] = value
            grouped = query.view(block.rows, key.shape[1], -1, query.shape[-1])  # (R, K, G, D)
            scores = torch.matmul(grouped, keys[:, :, :visible].transpose(2, 3)) + mask  # (R, K, G, L)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            return weighted_values(weights, values[:, :, :visible]).view(block.rows, -1)  # (R, H * D)

        return self._hidden_states(token_ids, block.lengths, attend)

    def decode_rows(self, token_ids: Tensor, block: CacheBlock, rows: Sequence[int]) -> Tensor:
        """Append one token to each row of ``block`` that ``rows`` lists. Return the last hidden states.

        The hidden states have the shape (N, E), with the hidden size E. N is the length of ``rows``, rounded up to a
        multiple of ``ROWS_MULTIPLE``. The first states belong to ``rows``, and the added states at the end are padding.
        The caller has to increase ``block.lengths``.
        """
        places = torch.tensor(rows, device=token_ids.device)  # (len(rows),)
        lengths = block.lengths[places]  # (len(rows),)
        padding = (0, round_up(len(rows), ROWS_MULTIPLE) - len(rows))

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = block.layer(index, key[:, :, None])  # (R, K, capacity, D)
            keys[places, :, lengths] = key[: len(rows)]
            values[places, :, lengths] = value[: len(rows)]
            mixed = query.new_zeros(len(query), query[0].numel())  # (N, H * D)
            for number, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
                grouped = query[number].view(key.shape[1], -1, query.shape[-1])  # (K, G, D)
                scores = torch.matmul(grouped, keys[row, :, : length + 1].transpose(1, 2))  # (K, G, L)
                weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
                mixed[number] = torch.matmul(weights, values[row, :, : length + 1]).flatten()
            return mixed

        return self._hidden_states(functional.pad(token_ids, padding), functional.pad(lengths, padding), attend)

    def _hidden_states(self, token_ids: Tensor, lengths: Tensor, attend: Attention) -> Tensor:
        """Return the last hidden states of N tokens, with the hidden size E: (N, E).

        ``lengths`` (N,) holds the number of earlier tokens in each token's sequence.
        """
        count = len(token_ids)
        hidden = functional.embedding(token_ids, self.embedding.weight)  # (N, E)
        cos, sin = self.rotary(hidden[:, None], lengths[:, None])  # (N, 1, D)
        for index, layer in enumerate(self.layers):
            normed = _rms_norm(hidden, layer.input_norm)
            query = _linear(normed, layer.query).view(count, -1, layer.head_size)  # (N, H, D)
            key = _linear(normed, layer.key).view(count, -1, layer.head_size)  # (N, K, D)
            value = _linear(normed, layer.value).view(count, -1, layer.head_size)  # (N, K, D)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = _rms_norm(query, layer.query_norm), _rms_norm(key, layer.key_norm)
            query = query * cos + _rotate_half(query) * sin
            key = key * cos + _rotate_half(key) * sin
            hidden = hidden + _linear(attend(index, query * layer.scaling, key, value), layer.output)
            normed = _rms_norm(hidden, layer.mlp_norm)
            gated = functional.silu(_linear(normed, layer.gate)) * _linear(normed, layer.up)
            hidden = hidden + _linear(gated, layer.down)
        return _rms_norm(hidden, self.norm)

    @torch.inference_mode()
    def has_independent_rows(self, head: nn.Module, rows: int) -> bool:
        """Return True if the bits of a row of a matrix product do not depend on the number of rows in the product.

        The linear maps of the first layer and ``head`` are tested with random states, for up to ``rows`` rows.
        """
        random = torch.Generator().manual_seed(0)
        for linear in (*self.layers[0].linears(), head):
            weight = next(linear.parameters())
            states = torch.randn((round_up(rows, ROWS_MULTIPLE), weight.shape[1]), generator=random).to(weight)
            whole = linear(states)
            parts = [linear(states[:count]) for count in range(ROWS_MULTIPLE, rows, ROWS_MULTIPLE)]
            if not all(torch.equal(part, whole[: len(part)]) for part in parts):
                return False
        return True


def _layer(module: Any) -> LlamaLayer:
    attention, mlp = module.self_attn, module.mlp
    modules = dict(attention.named_children())
    return LlamaLayer(
        module.input_layernorm,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        modules.get("q_norm"),
        modules.get("k_norm"),
        module.post_attention_layernorm,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        attention.head_dim,
        attention.scaling,
    )


def _linear(states: Tensor, linear: nn.Linear) -> Tensor:
    return functional.linear(states, linear.weight, linear.bias)


def _rms_norm(states: Tensor, norm: Any) -> Tensor:
    """Return states / sqrt(mean(states^2) + eps) * weight.

    The quotient is computed in fp32, and rounded to the data type of ``states`` before the multiplication.
    """
    wide = states.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return norm.weight * (wide * torch.rsqrt(variance + norm.variance_epsilon)).to(states.dtype)


def _rotate_half(states: Tensor) -> Tensor:
    """Return (-b, a), where a and b are the halves of the last dimension of ``states``."""
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)
