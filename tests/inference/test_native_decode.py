"""The native decode step has the logits of PyTorch up to rounding, and bits that depend on no other row."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs_compiler
from llama_models import MODELS, SIZES, decode, equal, make
from memory_maps import resident_bytes
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

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.inference import native_decode as native_library
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import PAGE_TOKENS, CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy
from agent_r1.inference.native_decode import (
    NativeDecoder,
    NativeLibrary,
    Unavailable,
    choose_native,
    find_compiler,
    load_library,
)
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.adapter import add_adapter, trained_weights, without_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.model.weights import cast_parameters

pytestmark = needs_compiler


def native_runner(model: PreTrainedModel, rows: int = 4) -> ModelRunner:
    native = NativeDecoder.of(model)
    assert isinstance(native, NativeDecoder), native
    return ModelRunner(model, rows, native=native)


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_pytorch(name: str) -> None:
    assert_close(decode(native_runner(make(name))), decode(ModelRunner(make(name), 4)))


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_bfloat16_have_the_bits_of_the_same_weights_in_float32(name: str) -> None:
    half = cast_parameters(make(name), "bfloat16")
    wide = copy.deepcopy(half).float()  # before a runner changes the attention in the configuration
    assert equal(decode(native_runner(half)), decode(native_runner(wide)))


def adapted(name: str, targets: tuple[str, ...]) -> PreTrainedModel:
    model = add_adapter(make(name), LoraConfig(rank=3, alpha=5, target_modules=targets), seed=0, base="base")
    change_adapter(model)
    return model


def change_adapter(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in trained_weights(model).values():
            weight.add_(0.1 * torch.randn_like(weight))


@pytest.mark.parametrize("targets", [("all-linear",), ("k_proj", "v_proj", "up_proj"), ("down_proj",)])
@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
def test_logits_with_an_adapter_are_those_of_pytorch(name: str, targets: tuple[str, ...]) -> None:
    model = adapted(name, targets)
    plain = decode(native_runner(without_adapter(model)))
    logits = decode(native_runner(model))
    assert_close(logits, decode(ModelRunner(copy.deepcopy(model), 4)))
    assert min(float((one - other).abs().max()) for one, other in zip(logits, plain, strict=True)) > 0.1


def test_a_changed_adapter_is_used_and_frozen_weights_are_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("llama", ("all-linear",))
    runner, pack, packed = native_runner(model), NativeDecoder._pack, list[torch.Size]()
    decode(runner)

    def watched(native: NativeDecoder, weights: Tensor) -> Tensor:
        packed.append(weights.shape)
        return pack(native, weights)

    monkeypatch.setattr(NativeDecoder, "_pack", watched)
    change_adapter(model)
    assert_close(decode(runner), decode(ModelRunner(copy.deepcopy(model), 4)))
    assert len(packed) == 2 * 4 * 2 and {min(shape) for shape in packed} == {3, 6, 9}  # A and B of layers' parts


def fill(runner: ModelRunner) -> None:
    """Give 64 rows prefixes of different lengths of the same sequence."""
    first = CacheSlot(runner.add_block(), 0)
    runner.prefill([PrefillChunk(first, (), tuple(index % 50 for index in range(150)))])
    runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, row), 2 * row + 1) for row in range(1, 64)])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_alone_and_among_others_with_any_number_of_threads(threads: int) -> None:
    whole = native_runner(make("qwen3"), 64)
    fill(whole)
    expected = whole.decode(0, {row: row % 50 for row in range(64)})
    torch.set_num_threads(threads)
    try:
        for rows in ([0], [63], [5, 4], [17, 3, 60], list(range(1, 12)), list(range(0, 64, 3))):
            runner = native_runner(make("qwen3"), 64)
            fill(runner)
            assert torch.equal(runner.decode(0, {row: row % 50 for row in rows}), expected[rows])
    finally:
        torch.set_num_threads(1)


def keys_and_values(runner: ModelRunner, row: int, tokens: int) -> list[Tensor]:
    block = runner.blocks[0]
    return [tensor[row, :, :tokens].clone() for tensor in (*block.keys, *block.values)]


@pytest.mark.parametrize("threads", [1, 3])
def test_prefilled_tokens_have_the_bits_of_decoded_tokens_in_any_division_with_any_number_of_threads(
    threads: int,
) -> None:
    sequence = tuple(7 * index % 50 for index in range(300))
    decoded = native_runner(make("qwen3"))
    decoded.add_block()
    for token in sequence:
        logits = decoded.decode(0, {0: token})
    expected = keys_and_values(decoded, 0, len(sequence))
    torch.set_num_threads(threads)
    try:
        for ends in ([299], [1, 299], [130, 131, 299]):
            runner = native_runner(make("qwen3"))
            slots = [CacheSlot(runner.add_block(), 0), CacheSlot(0, 2), CacheSlot(0, 3)]
            for start, end in zip([0, *ends], ends, strict=False):
                runner.prefill([PrefillChunk(slot, sequence[:start], sequence[start:end]) for slot in slots])
            for slot in slots:
                assert torch.equal(runner.decode(0, {slot.row: sequence[-1]}), logits)
                assert equal(keys_and_values(runner, slot.row, len(sequence)), expected)
    finally:
        torch.set_num_threads(1)


def test_only_the_new_tokens_of_running_rows_are_written() -> None:
    runner = native_runner(make("llama"), 64)
    fill(runner)
    block = runner.blocks[0]
    before = [tensor.clone() for tensor in (*block.keys, *block.values)]
    lengths = block.lengths.tolist()
    runner.decode(0, {2: 7, 40: 8})
    for old, new in zip(before, (*block.keys, *block.values), strict=True):
        changed = (old != new).any(-1).any(1).nonzero().tolist()  # (row, column)
        assert changed == [[2, lengths[2]], [40, lengths[40]]]
    assert block.lengths.tolist() == [length + (row in (2, 40)) for row, length in enumerate(lengths)]


class Scaled(nn.Linear):
    """A linear layer of another type, as quantization puts in its place."""

    def forward(self, states: Tensor) -> Tensor:
        return 2 * super().forward(states)


def with_another_linear_layer() -> PreTrainedModel:
    model: Any = make("llama")
    model.model.layers[1].mlp.up_proj = Scaled(32, 64, bias=False)
    return model


def with_a_float32_head() -> PreTrainedModel:
    model: Any = make("llama", torch.bfloat16)
    model.lm_head.float()
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)), "Llama-like"),
        (MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "Llama-like"),
        (
            Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
            "Llama-like",
        ),
        (LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), "Llama-like"),
        (with_another_linear_layer(), "Llama-like"),
        (with_a_float32_head(), "several data types"),
        (LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.float16), "float16"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=DYNAMIC)), "length of the sequence"),
    ],
    ids=[
        *("another architecture", "sliding window", "some sliding windows", "another activation"),
        *("another linear layer", "another data type", "float16", "dynamic RoPE"),
    ],
)
def test_other_models_are_refused_in_one_line_only_if_the_native_step_was_asked_for(
    model: PreTrainedModel, reason: str
) -> None:
    assert choose_native("auto", model) is None
    with pytest.raises(InvalidInput, match=rf"engine.decode_step: got native; leave it out: .*{reason}") as error:
        choose_native("native", model)
    assert "\n" not in str(error.value)


def test_torch_never_chooses_the_native_step() -> None:
    assert choose_native("auto", make("llama")) is not None and choose_native("torch", make("llama")) is None


def test_auto_takes_pytorch_for_large_models_with_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: native_library.MAX_THREADS + 1)
    assert choose_native("auto", make("llama")) is not None
    monkeypatch.setattr(native_library, "SMALL_MODEL", 1)
    assert choose_native("auto", make("llama")) is None and choose_native("native", make("llama")) is not None


def test_with_pytorch_a_row_has_the_same_bits_whatever_the_lengths_of_the_other_rows() -> None:
    prompt = tuple(index % 50 for index in range(300))
    logits = []
    for other in (5, 440, 500):
        runner = ModelRunner(make("qwen2, tied"), 64)
        block = runner.add_block()
        pair = (prompt, tuple(index % 7 for index in range(other)))
        runner.prefill([PrefillChunk(CacheSlot(block, row), (), tokens) for row, tokens in enumerate(pair)])
        logits.append(runner.decode(block, {0: 11}))
    assert equal(logits[1:], logits[:1] * 2)


def test_a_step_whose_logits_are_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeDecoder, "_measure_gap", lambda decoder: 0.01)
    assert choose_native("auto", make("llama")) is None
    with pytest.raises(InvalidInput, match=r"its logits differ from PyTorch's by 0\.01"):
        choose_native("native", make("llama"))


def test_without_a_compiler_pytorch_computes_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert choose_native("auto", make("llama")) is None
    with pytest.raises(InvalidInput, match=r"no C\+\+ compiler was found"):
        choose_native("native", make("llama"))


def fake_compiler(folder: Path, command: str) -> str:
    """Return a compiler that appends a line to the file ``calls`` and runs ``command``."""
    path = folder / "compiler"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit; fi\necho call >> {folder}/calls\n{command}\n',
        "utf-8",
    )
    path.chmod(0o755)
    return str(path)


def test_a_failed_compilation_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "CACHE", tmp_path / "cache")
    compiler = fake_compiler(tmp_path, "echo 'x.cpp:1: error: no such type' >&2; exit 1")
    found = load_library.__wrapped__(compiler)
    assert isinstance(found, Unavailable) and found.reason == f"{compiler} failed: x.cpp:1: error: no such type"


def test_the_library_is_compiled_once_if_several_callers_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_library(find_compiler())
    assert isinstance(real, NativeLibrary)
    monkeypatch.setattr(native_library, "CACHE", tmp_path / "cache")
    copying = 'while [ "$1" != -o ]; do shift; done; cp ' + f'{real.functions._name} "$2"'
    compiler = fake_compiler(tmp_path, copying)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(load_library.__wrapped__, [compiler] * 4))
    assert all(isinstance(library, NativeLibrary) and library.compiler == "fake 1.0" for library in found)
    assert (tmp_path / "calls").read_text("utf-8") == "call\n"


Turns = list[tuple[tuple[int, ...], Completion]]


async def converse(engine: TorchEngine, name: int) -> Turns:
    """Run three turns in one session. Half of the sessions begin with the same 256 tokens."""
    state = (*(index % 50 for index in range(256 if name % 2 else 9)), name % 50)
    turns: Turns = []
    for turn in range(3):
        params = SamplingParams(0.7, max_tokens=3 + (name + turn) % 8, seed=100 * name + turn)
        done = await engine.generate(Prompt(state), params, session_id=str(name))
        turns.append((state, done))
        state = (*state, *done.token_ids, 8, 9, 10)
    return turns


def converse_together(model: PreTrainedModel, names: list[int], gib: float = 0.1) -> list[Turns]:
    config = EngineConfig(max_sequences=16, decode_step="native", kv_cache_gib=gib)

    async def run() -> list[Turns]:
        engine = TorchEngine(copy.deepcopy(model), 512, config)
        cancelled = asyncio.ensure_future(engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=400)))
        turns = await asyncio.gather(*(converse(engine, name) for name in names))
        cancelled.cancel()
        await engine.close()
        return list(turns)

    return asyncio.run(run())


def test_conversations_have_the_same_bits_alone_and_the_logprobs_of_a_plain_forward_pass(
    tiny_model: PreTrainedModel,
) -> None:
    together = converse_together(tiny_model, list(range(8)))
    assert converse_together(tiny_model, [7]) == [together[7]] and converse_together(tiny_model, [4]) == [together[4]]
    for turns in together:
        for state, done in turns:
            with torch.no_grad():
                logits = tiny_model(torch.tensor([[*state, *done.token_ids]])).logits[0, len(state) - 1 : -1] / 0.7
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            assert (expected - torch.tensor(done.logprobs)).abs().max() < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/pagemap of Linux")
def test_the_kv_cache_takes_memory_for_its_tokens_and_not_for_the_context() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=64, num_attention_heads=2
    )
    lengths, page = [30, 1000, 100, 60, 450, 20, 200, 140], PAGE_TOKENS * 2 * 2 * 2 * 64 * 4

    async def run(context: int, pages: int) -> tuple[int, int]:
        settings = EngineConfig(max_sequences=8, decode_step="native", kv_cache_gib=pages * page / 2**30)
        engine = TorchEngine(LlamaForCausalLM(copy.deepcopy(config)).eval(), context, settings)
        for _ in range(2):
            prompts = [Prompt(tuple((index + length) % 50 for index in range(length))) for length in lengths]
            await asyncio.gather(*(engine.generate(prompt, SamplingParams(max_tokens=30)) for prompt in prompts))
        (block,) = engine._runner.blocks
        resident = sum(resident_bytes(tensor) for tensor in (*block.keys, *block.values))
        await engine.close()
        return resident, block.rows * block.capacity * page // PAGE_TOKENS

    resident, reserved = asyncio.run(run(16_000, 300))
    tokens = sum(length + 30 for length in lengths) * page // PAGE_TOKENS
    assert resident < 2 * tokens < reserved / 25  # slots may keep pages that only their earlier sequences needed
    assert asyncio.run(run(1_100, 20))[0] <= 20 * page  # less than the sequences have


def test_the_engine_decodes_with_updated_weights_and_fails_with_weights_that_are_not_finite(
    tiny_model: PreTrainedModel,
) -> None:
    async def run() -> tuple[tuple[float, ...], str]:
        engine = TorchEngine(copy.deepcopy(tiny_model), 64, EngineConfig(max_sequences=4, decode_step="native"))
        assert engine.decode_step.startswith("native (")
        update = copy.deepcopy(tiny_model)
        update.lm_head.weight.data.zero_()  # all tokens are equally likely
        await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", update))
        uniform = await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=4))
        update.lm_head.weight.data.fill_(float("nan"))
        await engine.update_weights(WeightUpdate(PolicyVersion(2, 2), "shared_memory", update))
        with pytest.raises(EngineError) as error:
            await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=4))
        await engine.close()
        return uniform.logprobs, str(error.value)

    uniform, error = asyncio.run(run())
    assert uniform == pytest.approx([-math.log(tiny_model.config.vocab_size)] * 4) and "not finite" in error
