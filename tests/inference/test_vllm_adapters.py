"""Adapters on a vLLM server: only the adapter is sent, and a server that does not serve it is found."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import tiny_model  # noqa: F401
from inference.fake_vllm import OWN_MODEL, FakeVllm, Fault
from transformers import PreTrainedModel

from agent_r1.core.inference import (
    AdapterFolders,
    Completion,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.inference.policy_engine import WeightFolders, write_weights
from agent_r1.inference.pool import EnginePool
from agent_r1.inference.server_process import ReplicaError
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.inference.vllm import VllmEngine, adapter_options
from agent_r1.model.adapter import add_adapter, trained_weights
from agent_r1.model.config import LoraConfig

CONTEXT = 256
PROMPT = Prompt((1, 2, 4))
PARAMS = SamplingParams(0.7, max_tokens=12, seed=2)
RANK = 4
Use = Callable[[VllmEngine, FakeVllm], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:  # noqa: F811
    model = copy.deepcopy(tiny_model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return add_adapter(model, LoraConfig(rank=RANK), seed=0, base="tiny")


@pytest.fixture
def folders(tmp_path: Path) -> WeightFolders:
    return WeightFolders(tmp_path, "float32", tied=False, shared_memory=False)


@pytest.fixture
def updates(policy: PreTrainedModel, folders: WeightFolders) -> Iterator[WeightUpdate]:
    def versions() -> Iterator[WeightUpdate]:
        model = copy.deepcopy(policy)
        torch.manual_seed(0)
        for number in range(5):
            yield write_weights(folders, model, PolicyVersion(number, step=number), adapters=True)
            with torch.no_grad():
                for weights in trained_weights(model).values():
                    weights.add_(1e-5 * torch.randn_like(weights))

    return versions()


def adapter_engine(server: FakeVllm) -> VllmEngine:
    return VllmEngine(server.url, OWN_MODEL, CONTEXT, adapters=True)


def serve(updates: Iterator[WeightUpdate], use: Use, *faults: Fault) -> Any:
    """Return the result of ``use(engine, server)`` with a server of version 0."""
    first = next(updates)
    assert isinstance(first.handle, AdapterFolders)

    async def run(server: FakeVllm) -> Any:
        engine = adapter_engine(server)
        try:
            await engine.update_weights(first)
            server.faults |= set(faults)
            return await use(engine, server)
        finally:
            server.faults.clear()
            await engine.close()
            assert not server.adapters

    with FakeVllm(str(first.handle.base), CONTEXT) as server:
        return asyncio.run(run(server))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.NO_LORA, "load_lora_adapter answered 404"),
        (Fault.TAKEN_NAME, "answered 400: .* has already been loaded"),
        (Fault.OLD_ADAPTER, "missed a change"),
        (Fault.OTHER_SCALE, "missed a change"),
        (Fault.LOST_ADAPTER, "answered 404: The model .* does not exist"),
    ],
)
def test_a_server_that_does_not_serve_a_new_adapter_is_found(
    updates: Iterator[WeightUpdate], fault: Fault, reason: str
) -> None:
    with pytest.raises(ReplicaError, match=reason):
        serve(updates, lambda engine, _: engine.update_weights(next(updates)), fault)


def test_tokens_are_those_of_the_adapted_model(updates: Iterator[WeightUpdate], policy: PreTrainedModel) -> None:
    async def embedded() -> Completion:
        engine = TorchEngine(copy.deepcopy(policy), CONTEXT)
        try:
            return await engine.generate(PROMPT, PARAMS)
        finally:
            await engine.close()

    async def use(engine: VllmEngine, server: FakeVllm) -> list[Completion]:
        first = await engine.generate(PROMPT, PARAMS)
        await engine.update_weights(next(updates))
        return [first, await engine.generate(PROMPT, PARAMS)]

    old, new = serve(updates, use)
    assert old == asyncio.run(embedded()) and new.logprobs != old.logprobs
    assert new.version_spans == (PolicyVersionSpan(0, 1),)


def test_an_update_loads_the_adapter_alone_and_the_server_keeps_two(updates: Iterator[WeightUpdate]) -> None:
    async def use(engine: VllmEngine, server: FakeVllm) -> list[int]:
        kept, sent = [], list[WeightUpdate]()
        for update in updates:
            await engine.update_weights(update)
            sent.append(update)
            kept.append(len(server.adapters))
        files = {file.name for file in Path(sent[-1].handle.adapter).iterdir()}  # type: ignore[attr-defined]
        assert {"adapter_config.json", "adapter_model.safetensors"} == files - {"README.md"}
        assert server.paths.count("/collective_rpc") == 1  # the frozen weights, at the first update
        await engine.update_weights(sent[-1])  # under a new name: a name that is loaded twice is refused
        return [*kept, len(server.adapters)]

    assert serve(updates, use) == [2, 2, 2, 2, 2]


def test_frozen_weights_are_loaded_again_after_those_of_another_policy(
    updates: Iterator[WeightUpdate],
    tiny_model: PreTrainedModel,  # noqa: F811
    tmp_path: Path,
) -> None:
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.1)
    folders = WeightFolders(tmp_path / "other", "float32", tied=False, shared_memory=False)
    (tmp_path / "other").mkdir()

    async def use(engine: VllmEngine, server: FakeVllm) -> list[int]:
        await engine.update_weights(write_weights(folders, other, PolicyVersion(0, step=0), adapters=True))
        served = await engine.generate(PROMPT, PARAMS)
        await engine.update_weights(next(updates))
        return [span.version for got in (served, await engine.generate(PROMPT, PARAMS)) for span in got.version_spans]

    assert serve(updates, use) == [0, 1]


def test_a_generation_in_progress_continues_with_the_new_adapter(updates: Iterator[WeightUpdate]) -> None:
    async def use(engine: VllmEngine, server: FakeVllm) -> Completion:
        pool = EnginePool([engine])
        asked = asyncio.ensure_future(pool.generate(PROMPT, SamplingParams(max_tokens=200)))
        while not server.running:
            await asyncio.sleep(0)
        await pool.update_weights(next(updates))
        return await asked

    got = serve(updates, use)
    assert len(got.token_ids) == 200 and [span.version for span in got.version_spans] == [1]


def test_a_request_that_arrives_after_an_update_has_the_version_of_the_adapter_that_it_names(
    updates: Iterator[WeightUpdate],
) -> None:
    async def use(engine: VllmEngine, server: FakeVllm) -> list[Completion]:
        before = await engine.generate(PROMPT, PARAMS)
        arrived, updated, answer = threading.Event(), threading.Event(), server.answer

        def answer_late(path: str, *rest: Any) -> Any:
            if path == "/inference/v1/generate" and not arrived.is_set():
                arrived.set()
                updated.wait()
            return answer(path, *rest)

        server.answer = answer_late  # type: ignore[method-assign]
        asked = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        await asyncio.to_thread(arrived.wait)
        await engine.update_weights(next(updates))
        updated.set()
        return [before, await asked]

    before, late = serve(updates, use)
    assert late == before and late.version_spans == (PolicyVersionSpan(0, 0),)


@pytest.mark.parametrize(
    ("rank", "arguments", "options"),
    [
        (0, "", ""),
        (4, "", "--enable-lora --max-lora-rank 8 --max-loras 2"),
        (512, "--dtype auto", "--enable-lora --max-lora-rank 512 --max-loras 2"),
        (513, "", ""),
        (4, "--no-enable-lora", ""),
    ],
)
def test_options_allow_the_rank_of_the_adapter(rank: int, arguments: str, options: str) -> None:
    assert " ".join(adapter_options(rank, arguments)) == options
