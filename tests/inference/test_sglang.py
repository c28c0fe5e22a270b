"""The client of an SGLang server: its end tokens, updates that abort requests, and a pool of such servers."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest
from inference.fake_sglang import FakeSglang
from inference.fake_vllm import Fault
from inference.server_backends import CONTEXT, PROMPT, SGLANG

from agent_r1.core.inference import Completion, SamplingParams, WeightUpdate
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.server_process import ReplicaError
from agent_r1.inference.sglang import SglangEngine


def test_a_stop_at_another_end_token_does_not_end_the_generation(versions: list[WeightUpdate]) -> None:
    """The configuration of the served model names end tokens that the run does not."""
    eos = tuple(range(3, 20, 2))
    params = SamplingParams(max_tokens=30, seed=4)
    got = SGLANG.serve(versions, lambda engine, _: engine.generate(PROMPT, params), eos=eos)
    assert (len(got.token_ids), got.finish_reason) == (30, "length")
    assert set(got.token_ids[:-1]) & set(eos)


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
        SGLANG.serve(versions, use)


def test_an_update_aborts_running_requests_which_continue_with_the_new_weights(versions: list[WeightUpdate]) -> None:
    """Each token has the version of the weights that sampled it, although an answer names one version only."""

    async def use(engine: SglangEngine, server: FakeSglang) -> Completion:
        generation = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=200, seed=5)))
        while not server.num_running:
            await asyncio.sleep(0.001)
        await engine.update_weights(versions[1])
        assert server.num_aborted == 1
        return await generation

    got = SGLANG.serve(versions, use)
    assert len(got.token_ids) == 200
    assert [span.version for span in got.version_spans] == [0, 1] and got.version_spans[1].start > 0


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
