"""What holds for the engine on every device. The tests on a GPU need one (make test-gpu)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

import pytest
import torch
from extras import needs_gpu
from llama_models import MODELS, SIZES, make
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy
from agent_r1.inference.torch_engine import TorchEngine

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
PROMPTS = [tuple(range(1, 2 + 5 * index)) for index in range(9)]


def model_of(name: str, device: str) -> PreTrainedModel:
    if name == "phi3":  # its decode steps are those of transformers
        torch.manual_seed(0)
        return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0, sliding_window=None)).eval().to(device)
    return (make("qwen3", torch.bfloat16) if name == "bfloat16" else make(name)).to(device)


@on_devices
@pytest.mark.parametrize("name", [*MODELS, "phi3", "bfloat16"])
def test_logits_are_those_of_a_plain_forward_pass(name: str, device: str) -> None:
    model = model_of(name, device)
    ids = torch.tensor([[7 * index % 50 for index in range(200)]], device=device)
    with torch.inference_mode():
        expected = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits[0].float()
    runner = ModelRunner(model, 4)
    tokens, slot = tuple(ids[0].tolist()), CacheSlot(runner.add_block(), 2)
    runner.prefill([PrefillChunk(slot, (), tokens[:100])])
    runner.prefill([PrefillChunk(slot, tokens[:100], tokens[100:150])])  # after earlier tokens
    logits = torch.stack([runner.decode(0, {2: token})[0] for token in tokens[150:]])
    limit = 0.05 if model.dtype == torch.bfloat16 else 2e-5
    assert (logits - expected[150:]).abs().max() <= limit * expected.abs().max()


@on_devices
def test_copied_prefixes_have_the_logits_of_computed_ones(device: str) -> None:
    runner = ModelRunner(make("qwen3").to(device), 4)
    first = CacheSlot(runner.add_block(), 0)
    runner.prefill([PrefillChunk(first, (), tuple(range(40)))])
    runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, 3), 40)])
    logits = runner.decode(0, {0: 7, 3: 7})
    assert torch.equal(logits[0], logits[1])


def complete(engine: TorchEngine, seeds: Sequence[int]) -> list[Completion]:
    """Return completions of some of ``PROMPTS``, sampled at the same time."""

    async def all_of_them() -> list[Completion]:
        requests = (engine.generate(Prompt(PROMPTS[s]), SamplingParams(max_tokens=40, seed=s)) for s in seeds)
        return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())


def make_engine(model: PreTrainedModel) -> TorchEngine:
    return TorchEngine(model, 256, EngineConfig(max_sequences=8, decode_step="torch"))


@on_devices
def test_a_completion_does_not_depend_on_the_other_sequences(device: str) -> None:
    together = complete(make_engine(make("qwen3").to(device)), range(9))
    for index in (0, 8):
        (alone,) = complete(make_engine(make("qwen3").to(device)), [index])
        assert alone.token_ids == together[index].token_ids
        assert alone.logprobs == together[index].logprobs


@on_devices
def test_new_weights_are_served(device: str) -> None:
    engine, other = make_engine(make("qwen3").to(device)), make("qwen3").to(device)
    before = complete(engine, [0])[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.update_weights(WeightUpdate(PolicyVersion(1, 1, None), "shared_memory", other)))
    after = complete(engine, [0])[0]
    assert before.logprobs != after.logprobs == complete(make_engine(other), [0])[0].logprobs
