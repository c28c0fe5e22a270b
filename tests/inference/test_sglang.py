"""The client of an SGLang server: exact tokens, aborted requests, and the failures of a server that it detects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from inference.fake_sglang import FakeSglang
from inference.fake_vllm import Fault

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, Prompt, SamplingParams, StopCondition
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.server_client import ReplicaError
from agent_r1.inference.sglang import SglangEngine
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model

CONTEXT = 256
PROMPT = Prompt((1, 2, 4))
Use = Callable[[SglangEngine, FakeSglang], Coroutine[Any, Any, Any]]


def serve(versions: list[WeightUpdate], use: Use, *faults: Fault, **options: Any) -> Any:
    """Return the result of ``use(engine, server)`` with a server of version 0."""

    async def run(server: FakeSglang) -> Any:
        engine = SglangEngine(server.url, CONTEXT)
        try:
            await engine.update_weights(versions[0])
            server.faults |= set(faults)
            return await use(engine, server)
        finally:
            await engine.close()

    with FakeSglang(str(versions[0].handle), CONTEXT, **options) as server:
        return asyncio.run(run(server))


def embedded(versions: list[WeightUpdate], prompt: Prompt, params: SamplingParams) -> Completion:
    async def run() -> Completion:
        engine = TorchEngine(load_model(str(versions[0].handle), torch.float32), CONTEXT)
        try:
            return await engine.generate(prompt, params)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7, max_tokens=12, seed=2**31 - 5),
        SamplingParams(0.0, max_tokens=12),
        SamplingParams(1.0, max_tokens=40, stop_token_ids=(3, 7, 11, 19), seed=2),
    ],
)
def test_tokens_and_log_probabilities_are_the_servers(versions: list[WeightUpdate], params: SamplingParams) -> None:
    got = serve(versions, lambda engine, _: engine.generate(PROMPT, params))
    assert got == embedded(versions, PROMPT, params)


def test_a_stop_at_another_end_token_does_not_end_the_generation(versions: list[WeightUpdate]) -> None:
    """The configuration of the served model names end tokens that the run does not."""
    eos = tuple(range(3, 20, 2))
    params = SamplingParams(max_tokens=30, seed=4)
    got = serve(versions, lambda engine, _: engine.generate(PROMPT, params), eos=eos)
    assert (len(got.token_ids), got.finish_reason) == (30, "length")
    assert set(got.token_ids[:-1]) & set(eos)


def test_the_most_likely_tokens_are_the_servers(versions: list[WeightUpdate]) -> None:
    params = SamplingParams(1.0, max_tokens=6, seed=2, top_logprobs=3)
    got = serve(versions, lambda engine, _: engine.generate(PROMPT, params), Fault.ABORT)
    assert len(got.top_logprobs) == len(got.token_ids) == 6
    for place, top in enumerate(got.top_logprobs):
        assert len({token for token, _ in top}) == len(top) == 3
        assert list(top) == sorted(top, key=lambda pair: -pair[1])
        assert got.token_ids[place] not in dict(top) or dict(top)[got.token_ids[place]] == got.logprobs[place]


def test_an_aborted_generation_is_continued_with_new_random_numbers(versions: list[WeightUpdate]) -> None:
    async def use(engine: SglangEngine, server: FakeSglang) -> tuple[Completion, list[int]]:
        server.seeds.clear()
        return await engine.generate(PROMPT, SamplingParams(max_tokens=10, seed=1)), server.seeds

    got, seeds = serve(versions, use, Fault.ABORT)
    assert (len(got.token_ids), got.finish_reason) == (10, "length")
    assert [(span.start, span.version) for span in got.version_spans] == [(0, 0)]
    assert len(set(seeds)) == 4 < len(seeds)  # a request that gave no token is repeated with the same seed


def test_a_stop_string_that_does_not_meet_the_condition_does_not_end_the_generation(
    versions: list[WeightUpdate],
) -> None:
    """The server stops at each token 5 or above; the condition is met by the third of them."""

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
        (Fault.KEPT_CACHE, "answered 400: Cache flush failed"),
        (Fault.OTHER_SHAPES, "answered 400: Worker failed: shapes differ"),
        (Fault.DIE_IN_UPDATE, "/update_weights_from_disk failed"),
    ],
)
def test_a_server_that_does_not_serve_new_weights_is_found(
    versions: list[WeightUpdate], fault: Fault, reason: str
) -> None:
    with pytest.raises(ReplicaError, match=reason):
        serve(versions, lambda engine, _: engine.update_weights(versions[1]), fault)


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"output_token_logprobs": [[-0.5, 5, None]]}, "do not belong together"),
        ({"output_token_logprobs": [[0.5, 4, None]]}, "positive or not finite"),
        ({"output_token_logprobs": [[None, 4, None]]}, "positive or not finite"),
        ({"weight_version": "default"}, "serves the weights 'default', which this run did not send"),
        ({"finish_reason": None}, "its answer is not SGLang's"),
    ],
)
def test_an_answer_that_contradicts_itself_is_a_failure_of_the_server(
    versions: list[WeightUpdate], meta: dict[str, Any], reason: str
) -> None:
    async def use(engine: SglangEngine, server: FakeSglang) -> Completion:
        right = {"finish_reason": {"type": "length"}, "weight_version": "0", "output_token_logprobs": [[-0.5, 4, None]]}
        answer = {"output_ids": [4], "meta_info": right | meta}
        server.generate = lambda body: (200, answer)  # type: ignore[method-assign]
        return await engine.generate(PROMPT, SamplingParams(max_tokens=1))

    with pytest.raises(ReplicaError, match=reason):
        serve(versions, use)


def test_an_update_aborts_running_requests_which_continue_with_the_new_weights(versions: list[WeightUpdate]) -> None:
    """Each token has the version of the weights that sampled it, although an answer names one version only."""

    async def use(engine: SglangEngine, server: FakeSglang) -> Completion:
        generation = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=200, seed=5)))
        while not server.num_running:
            await asyncio.sleep(0.001)
        await engine.update_weights(versions[1])
        assert server.num_aborted == 1
        return await generation

    got = serve(versions, use)
    assert len(got.token_ids) == 200
    assert [span.version for span in got.version_spans] == [0, 1] and got.version_spans[1].start > 0


def test_a_refused_request_is_no_failure_of_the_server(versions: list[WeightUpdate]) -> None:
    with pytest.raises(EngineError, match="refuses a request") as raised:
        serve(versions, lambda engine, _: engine.generate(Prompt((1,) * CONTEXT), SamplingParams()))
    assert not isinstance(raised.value, ReplicaError)
    with pytest.raises(EngineError, match="top_p 1"):
        serve(versions, lambda engine, _: engine.generate(PROMPT, SamplingParams(top_p=0.9)))


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.OLD_WEIGHTS, Fault.OLD_VERSION])
def test_a_pool_continues_on_other_servers_and_takes_a_server_back(versions: list[WeightUpdate], fault: Fault) -> None:
    async def run(servers: list[FakeSglang]) -> None:
        pool = EnginePool([SglangEngine(server.url, CONTEXT) for server in servers], PoolLimits())
        try:
            await pool.update_weights(versions[0])
            servers[0].faults.add(fault)
            await pool.update_weights(versions[1])
            params = SamplingParams(max_tokens=5)
            got = await asyncio.gather(*(pool.generate(PROMPT, params, session_id=f"{k}") for k in range(16)))
            assert {span.version for each in got for span in each.version_spans} == {1}
            assert pool.num_serving == 1
            if fault is not Fault.DIE:
                servers[0].faults.clear()
                await pool.update_weights(versions[1])
                assert pool.num_serving == 2
        finally:
            await pool.close()

    with ExitStack() as stack:
        folder = str(versions[0].handle)
        asyncio.run(run([stack.enter_context(FakeSglang(folder, CONTEXT)) for _ in range(2)]))


def test_updates_are_served(versions: list[WeightUpdate]) -> None:
    async def use(engine: SglangEngine, server: FakeSglang) -> Completion:
        assert await engine.update_weights(versions[1]) == PolicyVersion(1, step=1)
        return await engine.generate(PROMPT, SamplingParams(max_tokens=3))

    assert serve(versions, use).version_spans[0].version == 1
