"""The clients of vLLM and SGLang servers, each with a stand-in for its server, for tests that hold for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from inference.fake_sglang import FakeSglang
from inference.fake_vllm import FakeVllm, Fault

from agent_r1.core.inference import Prompt, WeightUpdate
from agent_r1.inference.pool import Replica
from agent_r1.inference.sglang import SglangEngine
from agent_r1.inference.vllm import VllmEngine

CONTEXT = 256
PROMPT = Prompt((1, 2, 4))
Use = Callable[[Any, Any], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Backend:
    """A client, made from the address of a server, and the class of the server."""

    name: str
    engine: Callable[[str], Replica]
    server: type[FakeVllm]

    def __str__(self) -> str:
        return self.name

    def serve(self, versions: list[WeightUpdate], use: Use, *faults: Fault, **options: Any) -> Any:
        """Return the result of ``use(engine, server)`` with a server of version 0."""

        async def run(server: FakeVllm) -> Any:
            engine = self.engine(server.url)
            try:
                await engine.update_weights(versions[0])
                server.faults |= set(faults)
                return await use(engine, server)
            finally:
                await engine.close()

        with self.server(str(versions[0].handle), CONTEXT, **options) as server:
            return asyncio.run(run(server))


VLLM = Backend("vllm", lambda url: VllmEngine(url, "policy", CONTEXT), FakeVllm)
SGLANG = Backend("sglang", lambda url: SglangEngine(url, CONTEXT), FakeSglang)
