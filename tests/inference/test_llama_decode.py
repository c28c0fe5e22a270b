"""The decode step of Llama-like models gives the bits of the model's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
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
from agent_r1.inference.llama_decode import LLAMA_LIKE, LlamaDecoder
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
    model = kind(config).eval().to(dtype)
    for parameter in model.parameters():  # norms and biases are constant at first
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def decode(runner: ModelRunner, steps: int = 3) -> list[Tensor]:
    """Return the logits of decode steps after three prompts of different lengths, in a block of four rows."""
    block = runner.add_block()
    runner.prefill([PrefillChunk(CacheSlot(block, row), 0, prompt) for row, prompt in enumerate(PROMPTS)])
    return [runner.decode(block, {row: (11 * step + row) % 50 for row in (0, 2, 1)}) for step in range(steps)]


def decode_by_transformers(model: PreTrainedModel) -> list[Tensor]:
    runner = ModelRunner(model, 4)
    runner._llama = None
    return decode(runner)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_transformers(name: str, dtype: torch.dtype) -> None:
    runner = ModelRunner(make(name, dtype), 4)
    assert runner._llama is not None
    assert equal(decode(runner), decode_by_transformers(make(name, dtype)))


def test_loaded_weights_are_used() -> None:
    runner = ModelRunner(make("qwen3"), 4)
    before = decode(runner)
    other = {name: tensor * 1.5 for name, tensor in make("qwen3").state_dict().items()}
    runner.model.load_state_dict(other)
    expected = make("qwen3")
    expected.load_state_dict(other)
    after = decode(runner)
    assert equal(after, decode_by_transformers(expected)) and not equal(after, before)


class Scaled(nn.Linear):
    """A linear layer of another type, as adapters and quantization put in its place."""

    def forward(self, states: Tensor) -> Tensor:
        return 2 * super().forward(states)


def with_another_linear_layer() -> PreTrainedModel:
    model: Any = make("llama")
    model.model.layers[1].mlp.up_proj = Scaled(32, 64, bias=False)
    return model


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)),
        Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
        LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")),
        with_another_linear_layer(),
    ],
    ids=["another architecture", "sliding window", "some sliding windows", "another activation", "another linear"],
)
def test_other_models_run_through_transformers(model: PreTrainedModel) -> None:
    assert LlamaDecoder.of(model) is None


@pytest.mark.parametrize("own", [250, 300, 400])
@pytest.mark.parametrize("path", ["llama", "transformers"])
def test_a_row_has_the_same_bits_whatever_the_lengths_of_the_other_rows(path: str, own: int) -> None:
    """With 448 or 512 visible columns, one product of weights and values has other bits than with fewer columns."""
    prompt = tuple(index % 50 for index in range(own))
    logits = []
    for other in (5, 440, 500):
        runner = ModelRunner(make("qwen2, tied"), 64)
        if path == "transformers":
            runner._llama = None
        block = runner.add_block()
        pair = (prompt, tuple(index % 7 for index in range(other)))
        runner.prefill([PrefillChunk(CacheSlot(block, row), 0, tokens) for row, tokens in enumerate(pair)])
        logits.append(runner.decode(block, {0: 11}))
    assert equal(logits[1:], logits[:1] * 2)


def test_each_named_architecture_is_tested() -> None:
    assert {kind.__name__ for kind, _ in MODELS.values()} == set(LLAMA_LIKE)
