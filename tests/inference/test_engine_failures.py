"""The embedded engine: invalid requests, shutdown, checksums, and the memory of the KV cache."""

import asyncio
import copy
import threading

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import PolicyVersion, Prompt, SamplingParams, WeightUpdate
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.model_runner import ModelRunner
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.weights import weights_checksum

CONFIG = EngineConfig(max_sequences=8)


def engine_of(model, config=CONFIG, context=512):
    return TorchEngine(copy.deepcopy(model), context, config)


@pytest.mark.parametrize(
    ("prompt", "sampling", "why"),
    [
        ((), SamplingParams(), "at least one token"),
        ((1, 50), SamplingParams(), "outside the vocabulary"),
        ((1,) * 500, SamplingParams(max_tokens=13), "exceed the context"),
    ],
)
def test_an_invalid_request_is_an_error_and_others_continue(tiny_model, prompt, sampling, why):
    async def run():
        engine = engine_of(tiny_model)
        neighbour = asyncio.create_task(
            engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=30), session_id="neighbour")
        )
        with pytest.raises(EngineError, match=why):
            await engine.generate(Prompt(prompt), sampling)
        done = await neighbour
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(Prompt((1, 2)), SamplingParams())
        return done

    assert asyncio.run(run()).finish_reason in ("stop", "length")


def test_closing_the_engine_fails_running_generations(tiny_model):
    async def run():
        engine = engine_of(tiny_model)
        unfinished = asyncio.create_task(
            engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=400), session_id="unfinished")
        )
        while engine.num_generated_tokens < 3:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(unfinished, 600)

    asyncio.run(run())


@pytest.mark.parametrize("running", [True, False], ids=["running", "waiting"])
def test_releasing_a_session_fails_its_unfinished_generation_and_no_other(tiny_model, running):
    async def run():
        engine = engine_of(tiny_model)
        released, other = (
            asyncio.create_task(engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=200), session_id=name))
            for name in ("released", "other")
        )
        await asyncio.sleep(0)  # both requests are added
        while running and engine.num_generated_tokens == 0:
            await asyncio.sleep(0.001)
        await engine.release("released")
        with pytest.raises(EngineError, match="the session was released"):
            await released
        again = await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3), session_id="released")
        done = await other
        await engine.close()
        return len(again.token_ids), len(done.token_ids)

    assert asyncio.run(run()) == (3, 200)


def test_if_the_worker_thread_ends_all_callers_get_an_error(tiny_model, monkeypatch):
    def end(*_):
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the thread is expected to end

    async def run():
        engine = engine_of(tiny_model)
        monkeypatch.setattr(ModelRunner, "decode", end)
        calls = [engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3)) for _ in range(3)]
        calls.append(engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", tiny_model)))
        errors = await asyncio.wait_for(asyncio.gather(*calls[:3], return_exceptions=True), 600)
        errors += await asyncio.wait_for(asyncio.gather(calls[3], return_exceptions=True), 600)
        await engine.close()
        return errors

    errors = asyncio.run(run())
    assert len(errors) == 4 and all("thread has ended" in str(error) for error in errors)


def test_closing_the_engine_fails_an_update_that_is_being_loaded(tiny_model, monkeypatch):
    loading, release = threading.Event(), threading.Event()

    def load(self, update):
        loading.set()
        release.wait(120)
        return update.version

    monkeypatch.setattr(TorchEngine, "_load_weights", load)

    async def run():
        engine = engine_of(tiny_model)
        update = asyncio.create_task(
            engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", tiny_model))
        )
        while not loading.is_set():
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(engine.close())
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(update, 600)
        assert not closing.done()
        release.set()
        await closing

    asyncio.run(run())


def test_a_model_with_another_attention_is_an_error():
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(2.0)
    with pytest.raises(InvalidInput, match="plain causal attention"):
        TorchEngine(model, 128)


def test_a_checksum_is_computed_in_the_worker_thread_and_only_if_the_update_has_one(tiny_model, monkeypatch):
    threads = []

    def checksum(model):
        threads.append(threading.current_thread().name)
        return weights_checksum(model)

    monkeypatch.setattr("agent_r1.inference.torch_engine.weights_checksum", checksum)

    async def run(version):
        engine = engine_of(tiny_model)
        served = await engine.update_weights(WeightUpdate(version, "shared_memory", tiny_model))
        await engine.close()
        return served

    assert asyncio.run(run(PolicyVersion(1, 1))) == PolicyVersion(1, 1) and threads == []
    assert asyncio.run(run(PolicyVersion(1, 1, "another"))) == PolicyVersion(1, 1, weights_checksum(tiny_model))
    assert threads == ["engine"]
