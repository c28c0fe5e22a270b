"""The client of a vLLM server: exact tokens, and the failures of a server that it detects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from inference.fake_vllm import FakeVllm, Fault
from inference.server_backends import CONTEXT, PROMPT, serve

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, Prompt, SamplingParams, StopCondition, WeightUpdate
from agent_r1.inference.pool import Replica
from agent_r1.inference.server_process import ReplicaError
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model


def embedded(versions: list[WeightUpdate], params: SamplingParams) -> Completion:
    """Return the completion of the embedded engine with version 0."""

    async def run() -> Completion:
        engine = TorchEngine(load_model(str(versions[0].handle), torch.float32), CONTEXT)
        try:
            return await engine.generate(PROMPT, params)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("params", "seed"),
    [
        (SamplingParams(0.0, max_tokens=12), 0),
        (SamplingParams(1.0, max_tokens=40, stop_token_ids=(3, 7, 11, 19), seed=2), 2),
        (SamplingParams(0.7, max_tokens=12, seed=2**63 + 5), 5),
    ],
    ids=str,
)
def test_tokens_and_log_probabilities_are_the_servers(
    params: SamplingParams, seed: int, versions: list[WeightUpdate]
) -> None:
    got = serve(versions, lambda engine, _: engine.generate(PROMPT, params))
    sent = SamplingParams(
        params.temperature, max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids, seed=seed
    )
    assert got == embedded(versions, sent)


def test_an_aborted_generation_is_continued_with_new_random_numbers(versions: list[WeightUpdate]) -> None:
    async def use(engine: Replica, server: FakeVllm) -> tuple[Completion, list[int]]:
        server.seeds.clear()
        return await engine.generate(PROMPT, SamplingParams(max_tokens=10, seed=1)), server.seeds

    got, seeds = serve(versions, use, Fault.ABORT)
    assert (len(got.token_ids), got.finish_reason) == (10, "length")
    assert [(span.start, span.version) for span in got.version_spans] == [(0, 0)]
    assert len(set(seeds)) == 4 < len(seeds)  # a request that gave no token is repeated with the same seed


def test_a_server_that_aborts_every_request_is_an_engine_error(
    versions: list[WeightUpdate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.inference.pool.MAX_ABORT_SECONDS", 0.0)
    with pytest.raises(EngineError, match="aborted the same request 20 times"):
        serve(versions, lambda engine, _: engine.generate(PROMPT, SamplingParams()), Fault.ALWAYS_ABORT)


def test_a_stop_string_that_does_not_meet_the_condition_does_not_end_the_generation(
    versions: list[WeightUpdate],
) -> None:
    def count(ids: Any) -> int:
        return sum(token >= 5 for token in ids)

    condition = StopCondition(("!",), lambda ids: count(ids) == 3 and ids[-1] >= 5)
    params = SamplingParams(max_tokens=50, seed=3, stop_condition=condition)
    got = serve(
        versions,
        lambda engine, _: engine.generate(PROMPT, params),
        decode=lambda ids: "!" if ids[-1] >= 5 else "",
    )
    assert got.finish_reason == "stop" and count(got.token_ids) == 3 and len(got.token_ids) < 50


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.WRONG_LOGPROBS, "differ from the trainer's"),
        (Fault.RAW_LOGPROBS, "differ from the trainer's"),
        (Fault.NO_LOGPROBS, "lacks log-probabilities"),
        (Fault.OLD_HEAD, "missed a change"),
        (Fault.OLD_WEIGHTS, "missed a change"),
        (Fault.OLD_CACHE, "missed a change"),
        (Fault.KEPT_CACHE, "keys and values of older weights"),
        (Fault.OTHER_SHAPES, "answered 500: Worker failed: shapes differ$"),
        (Fault.DIE_IN_UPDATE, "/collective_rpc failed"),
    ],
    ids=str,
)
def test_a_server_that_does_not_serve_new_weights_is_found(
    fault: Fault, reason: str, versions: list[WeightUpdate]
) -> None:
    with pytest.raises(ReplicaError, match=reason):
        serve(versions, lambda engine, _: engine.update_weights(versions[1]), fault)


def test_a_cancelled_generation_closes_its_request(versions: list[WeightUpdate]) -> None:
    async def use(engine: Replica, server: FakeVllm) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate(PROMPT, SamplingParams())
        server.faults.clear()
        server.hung.set()
        assert len((await engine.generate(PROMPT, SamplingParams(max_tokens=3))).token_ids) == 3

    serve(versions, use, Fault.HANG)


def test_a_refused_request_is_no_failure_of_the_server(versions: list[WeightUpdate]) -> None:
    with pytest.raises(EngineError, match="refuses a request") as raised:
        serve(versions, lambda engine, _: engine.generate(Prompt((1,) * CONTEXT), SamplingParams()))
    assert not isinstance(raised.value, ReplicaError)
    with pytest.raises(EngineError, match="top_p 1"):
        serve(versions, lambda engine, _: engine.generate(PROMPT, SamplingParams(top_p=0.9)))
