"""An engine behind HTTP is equal to the embedded one, bit for bit, and takes new weights from a folder."""

import asyncio
import copy
from pathlib import Path

import pytest
import torch

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    StopCondition,
    WeightUpdate,
)
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.weights import weights_checksum
from tests.inference.http_engine import EngineServer, HttpEngine

CONTEXT = 512
PARAMS = [
    SamplingParams(max_tokens=20, seed=1),
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=12, max_tokens=20, stop_token_ids=(3,), seed=2),
    SamplingParams(max_tokens=20, seed=4, stop_condition=StopCondition(("?",), lambda ids: len(ids) == 7)),
]


async def complete(engine: InferenceEngine) -> list[Completion]:
    """Return the completions of two turns in several sessions at the same time."""

    async def converse(index: int, params: SamplingParams) -> list[Completion]:
        first = await engine.generate(Prompt((1, 2, 4 + index)), params, session_id=str(index))
        prompt = Prompt((1, 2, 4 + index, *first.token_ids, 9, 9))
        second = await engine.generate(prompt, params, session_id=str(index))
        await engine.release(str(index))
        return [first, second]

    turns = await asyncio.gather(*(converse(index, params) for index, params in enumerate(PARAMS)))
    return [completion for both in turns for completion in both]


@pytest.fixture(scope="module")
def changed(tiny_model):
    changed = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.3)
    return changed


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_completions_equal_those_of_the_embedded_engine(tiny_model, changed, tmp_path: Path) -> None:
    """Before and after an update of the weights."""
    version = PolicyVersion(1, step=1, checksum=weights_checksum(changed))
    folder = save(changed, tmp_path / "version-1")

    async def run(engine: InferenceEngine, update: WeightUpdate) -> tuple[list[Completion], list[Completion]]:
        before = await complete(engine)
        assert await engine.update_weights(update) == version
        after = await complete(engine)
        await engine.close()
        return before, after

    embedded = TorchEngine(copy.deepcopy(tiny_model), CONTEXT)
    expected = asyncio.run(run(embedded, WeightUpdate(version, "shared_memory", changed)))
    with EngineServer(str(save(tiny_model, tmp_path / "version-0")), CONTEXT) as server:
        remote = HttpEngine(server.url, CONTEXT)
        assert asyncio.run(run(remote, WeightUpdate(version, "safetensors", folder))) == expected
    before, after = expected
    assert before != after and {span.version for one in after for span in one.version_spans} == {1}
    assert len(before[-1].token_ids) == 7 and before[-1].finish_reason == "stop"


def test_failures_of_the_server_are_engine_errors(tiny_model, tmp_path: Path) -> None:
    async def run(engine: HttpEngine, server: EngineServer) -> None:
        with pytest.raises(EngineError, match="at least one token"):
            await engine.generate(Prompt(()), SamplingParams())
        with pytest.raises(EngineError, match="nowhere"):
            await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "safetensors", tmp_path / "nowhere"))
        with pytest.raises(EngineError, match="takes a folder"):
            await engine.update_weights(WeightUpdate(PolicyVersion(1, 1), "shared_memory", tiny_model))
        assert len((await engine.generate(Prompt((1, 2)), SamplingParams(max_tokens=3))).token_ids) == 3
        await engine.close()

    with EngineServer(str(save(tiny_model, tmp_path / "version-0")), CONTEXT) as server:
        asyncio.run(run(HttpEngine(server.url, CONTEXT), server))

    async def ask_closed() -> None:
        with pytest.raises(EngineError, match="does not answer"):
            await HttpEngine(server.url, CONTEXT).generate(Prompt((1, 2)), SamplingParams())

    asyncio.run(ask_closed())
