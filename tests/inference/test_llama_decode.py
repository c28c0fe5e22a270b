"""The decode step of Llama-like models gives the bits of the model's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llama_models import MODELS, SIZES, decode, equal, make
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
)

from agent_r1.inference import model_runner
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk
from agent_r1.inference.native_decode import LlamaDecoder


def decode_rows(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the logits of :func:`decode` by a runner that computes only the running rows."""
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "LARGE_MODEL", 0)
        runner = ModelRunner(model, 64)
    assert runner._row_decoder is not None
    return decode(runner)


def decode_by_transformers(model: PreTrainedModel) -> list[Tensor]:
    runner = ModelRunner(model, 4)
    runner._llama = None
    return decode(runner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_transformers(name: str, dtype: torch.dtype) -> None:
    runner = ModelRunner(make(name, dtype), 4)
    assert runner._llama is not None
    assert equal(decode(runner), decode_by_transformers(make(name, dtype)))


@pytest.mark.parametrize("name", MODELS)
def test_running_rows_alone_have_the_logits_of_the_whole_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, whole = decode_rows(make(name), monkeypatch), decode(ModelRunner(make(name), 64))
    for one, other in zip(alone, whole, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= 1e-5 * other.abs().max()


class DependentRows(nn.Linear):
    """A linear layer whose results depend on the number of rows, as kernels for few rows can make them."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * (1 + 1e-6 * len(states))


def test_the_whole_block_is_computed_if_bits_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "LARGE_MODEL", 0)
    model = make("llama")
    assert ModelRunner(model, 64)._row_decoder is not None
    model.lm_head = DependentRows(32, 50, bias=False)
    assert ModelRunner(model, 64)._row_decoder is None


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


@pytest.mark.parametrize("path", ["llama", "transformers"])
def test_a_row_has_the_same_bits_whatever_the_lengths_of_the_other_rows(path: str) -> None:
    prompt = tuple(index % 50 for index in range(300))
    logits = []
    for other in (5, 440, 500):
        runner = ModelRunner(make("qwen2, tied"), 64)
        if path == "transformers":
            runner._llama = None
        block = runner.add_block()
        pair = (prompt, tuple(index % 7 for index in range(other)))
        runner.prefill([PrefillChunk(CacheSlot(block, row), (), tokens) for row, tokens in enumerate(pair)])
        logits.append(runner.decode(block, {0: 11}))
    assert equal(logits[1:], logits[:1] * 2)
