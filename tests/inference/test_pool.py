"""A pool of servers is one engine: it survives the failure of servers, and no server serves unproven weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, PolicyVersion, Prompt, SamplingParams, StopCondition, WeightUpdate
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.vllm import VllmEngine

CONTEXT = 256
PROMPT = Prompt((1, 2, 4))
PARAMS = SamplingParams(max_tokens=6, seed=1)
LONG = SamplingParams(max_tokens=200, seed=1)
Use = Callable[[EnginePool, Sequence[FakeVllm]], Coroutine[Any, Any, Any]]


def serve(versions: list[WeightUpdate], use: Use, size: int = 2, **limits: float) -> Any:
    """Return the result of ``use(pool, servers)`` with a pool of servers of version 0."""

    async def run(servers: Sequence[FakeVllm]) -> Any:
        replicas = [VllmEngine(server.url, "policy", CONTEXT) for server in servers]
        pool = EnginePool(replicas, PoolLimits(**{"in_flight": 8, **limits}))  # type: ignore[arg-type]
        try:
            await pool.update_weights(versions[0])
            for server in servers:
                server.paths.clear()
            return await use(pool, servers)
        finally:
            await pool.close()

    with ExitStack() as stack:
        folder = str(versions[0].handle)
        return asyncio.run(run([stack.enter_context(FakeVllm(folder, CONTEXT)) for _ in range(size)]))


async def ask(pool: EnginePool, count: int, params: SamplingParams = PARAMS) -> list[Completion]:
    prompts = [Prompt((*PROMPT.token_ids, number)) for number in range(count)]
    return await asyncio.gather(
        *(pool.generate(prompt, params, session_id=str(number)) for number, prompt in enumerate(prompts))
    )


def requests(server: FakeVllm) -> int:
    return server.paths.count("/inference/v1/generate")


def test_sessions_are_spread_and_keep_their_server(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> list[int]:
        await ask(pool, 6)
        first = [requests(server) for server in servers]
        await pool.generate(PROMPT, PARAMS, session_id="1")
        await pool.generate(PROMPT, PARAMS, session_id="1")
        return [*first, *(requests(server) for server in servers)]

    assert serve(versions, use) == [3, 3, 3, 5]


def test_a_server_has_no_more_requests_than_the_limit(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> int:
        servers[0].faults.add(Fault.HANG)
        asked = [asyncio.ensure_future(pool.generate(PROMPT, PARAMS)) for _ in range(9)]
        while requests(servers[0]) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        waiting = requests(servers[0])
        servers[0].faults.clear()
        servers[0].hung.set()
        assert len(await asyncio.gather(*asked)) == 9
        return waiting

    assert serve(versions, use, size=1, in_flight=3) == 3


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.FAIL_ONCE, Fault.ABORT, Fault.OLD_VERSION])
def test_requests_of_a_failing_server_are_answered(versions: list[WeightUpdate], fault: Fault) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> int:
        servers[0].faults.add(fault)
        if fault is Fault.OLD_VERSION:
            servers[0].version = "7"
        for got in await ask(pool, 6):
            assert (len(got.token_ids), got.finish_reason, len(got.logprobs)) == (6, "length", 6)
            assert {span.version for span in got.version_spans} == {0}
        return pool.num_serving

    assert serve(versions, use) == (2 if fault in (Fault.FAIL_ONCE, Fault.ABORT) else 1)


def test_a_server_that_hangs_is_left_out(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> str:
        servers[0].faults.add(Fault.HANG)
        assert len(await ask(pool, 4)) == 4
        return pool.reasons()

    assert "answered nothing for 0.2 s" in serve(versions, use, stall_seconds=0.2)


@pytest.mark.parametrize("fault", [Fault.OLD_WEIGHTS, Fault.DIE_IN_UPDATE])
def test_a_server_without_canary_serves_nothing(versions: list[WeightUpdate], fault: Fault) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> None:
        servers[0].faults.add(fault)
        await ask(pool, 2)  # the sessions "0" and "1" have a server each
        assert (await pool.update_weights(versions[1])).number == 1
        before = [requests(server) for server in servers]
        assert all(span.version == 1 for got in await ask(pool, 4) for span in got.version_spans)
        assert [requests(server) for server in servers] == [before[0], before[1] + 4]

    serve(versions, use)


def test_all_servers_stage_new_weights_before_one_samples_from_them(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> None:
        order: list[tuple[str, int]] = []
        for number, server in enumerate(servers):
            answer = server.answer

            def note(path: str, *rest: Any, number: int = number, answer: Any = answer) -> Any:
                result = answer(path, *rest)
                order.append((path, number))
                return result

            server.answer = note  # type: ignore[method-assign]
        reload = servers[1].reload

        def reload_slowly(folder: str) -> Any:
            time.sleep(0.3)
            return reload(folder)

        servers[1].reload = reload_slowly  # type: ignore[method-assign]
        await pool.update_weights(versions[1])
        paths = [path for path, _ in order]
        last_load = len(paths) - 1 - paths[::-1].index("/collective_rpc")
        assert paths.count("/collective_rpc") == 2
        assert last_load < min(paths.index("/resume"), paths.index("/inference/v1/generate"))

    serve(versions, use)


def answer_before_canary(server: FakeVllm) -> None:
    """Let the server complete a generation during the next update, before it answers the canary."""
    completed, score = server.completed, server.score
    answered = threading.Event()

    def note(*answer: Any) -> Any:
        answered.set()
        return completed(*answer)

    def score_late(*request: Any) -> Any:
        answered.wait()
        time.sleep(0.3)
        return score(*request)

    server.completed, server.score = note, score_late  # type: ignore[method-assign]


def sample_before_update(server: FakeVllm, count: int) -> threading.Event:
    """Let the server sample ``count`` tokens before it loads the next weights, and the other tokens afterwards.

    Return an event that is set after these tokens. The request must have a stop string.
    """
    sampled, queued, update = threading.Event(), threading.Event(), server.engine.update_weights

    def decode(token_ids: Sequence[int]) -> str:
        if len(token_ids) == count:
            sampled.set()
            queued.wait()
        return ""

    async def update_weights(weights: WeightUpdate) -> PolicyVersion:
        updating = asyncio.ensure_future(update(weights))
        await asyncio.sleep(0)  # the engine has the update, and takes it before the next token
        queued.set()
        return await updating

    server.decode, server.engine.update_weights = decode, update_weights  # type: ignore[method-assign]
    return sampled


def test_generations_continue_through_an_update(versions: list[WeightUpdate]) -> None:
    params = replace(LONG, stop_condition=StopCondition(("never",), lambda token_ids: False))

    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> Completion:
        answer_before_canary(servers[0])
        sampled = sample_before_update(servers[0], 5)
        asked = asyncio.ensure_future(pool.generate(PROMPT, params))
        await asyncio.to_thread(sampled.wait)
        await pool.update_weights(versions[1])
        got = await asked
        assert [requests(server) for server in servers] == [1 + 4, 4]  # the canary takes four
        return got

    got = serve(versions, use)
    assert len(got.token_ids) == 200 == len(got.logprobs)
    assert [(span.start, span.version) for span in got.version_spans] == [(0, 0), (5, 1)]


def test_tokens_of_a_server_that_fails_the_canary_are_sampled_again(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> None:
        servers[0].faults.add(Fault.OLD_WEIGHTS)
        answer_before_canary(servers[0])
        asked = asyncio.ensure_future(pool.generate(PROMPT, LONG))
        while not requests(servers[0]):
            await asyncio.sleep(0.005)
        await pool.update_weights(versions[1])
        assert len((await asked).token_ids) == 200
        assert [requests(server) for server in servers] == [1 + 4, 4 + 1]

    serve(versions, use)


def test_a_server_that_works_again_serves_after_the_next_update(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> list[int]:
        servers[0].faults.add(Fault.OLD_WEIGHTS)
        await pool.update_weights(versions[1])
        fenced = pool.num_serving
        servers[0].faults.clear()
        await pool.update_weights(versions[0])
        return [fenced, pool.num_serving]

    assert serve(versions, use) == [1, 2]


def test_a_generation_in_a_pool_that_is_closed_ends_with_an_engine_error(versions: list[WeightUpdate]) -> None:
    async def use(pool: EnginePool, servers: Sequence[FakeVllm]) -> None:
        servers[0].faults.add(Fault.HANG)
        asked = asyncio.ensure_future(pool.generate(PROMPT, PARAMS))
        while not requests(servers[0]):
            await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await asked

    serve(versions, use, size=1)
