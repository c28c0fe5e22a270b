"""Use the client of a vLLM server with a stand-in for its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from inference.fake_vllm import FakeVllm, Fault

from agent_r1.core.inference import Dtype, Prompt, WeightUpdate
from agent_r1.inference.vllm import VllmEngine

CONTEXT = 256
PROMPT = Prompt((1, 2, 4))
Use = Callable[[Any, Any], Coroutine[Any, Any, Any]]


def serve(
    versions: list[WeightUpdate],
    use: Use,
    *faults: Fault,
    dtype: Dtype = "float32",
    reports_checksums: bool = False,
    **options: Any,
) -> Any:
    """Return the result of ``use(engine, server)`` with a server of version 0."""

    async def run(server: FakeVllm) -> Any:
        engine = VllmEngine(server.url, "policy", CONTEXT, dtype, reports_checksums=reports_checksums)
        try:
            await engine.update_weights(versions[0])
            server.faults |= set(faults)
            return await use(engine, server)
        finally:
            await engine.close()

    with FakeVllm(str(versions[0].handle), CONTEXT, **options) as server:
        return asyncio.run(run(server))
