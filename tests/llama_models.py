"""Small random models of all Llama-like architectures, and decode steps with them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig(**SIZES, head_dim=16)),
}
PROMPTS = ((7, 8, 9), (3,) * 70, (1, 2))


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).eval().to(dtype)  # a runner changes the attention in the configuration
    for parameter in model.parameters():  # norms and biases are constant at first
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def decode(runner: ModelRunner, steps: int = 3) -> list[Tensor]:
    """Return the logits of decode steps after three prompts of different lengths, in a block of four rows."""
    block = runner.add_block()
    runner.prefill([PrefillChunk(CacheSlot(block, row), (), prompt) for row, prompt in enumerate(PROMPTS)])
    return [runner.decode(block, {row: (11 * step + row) % 50 for row in (0, 2, 1)}) for step in range(steps)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
