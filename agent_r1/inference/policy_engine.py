"""Engines for several policies on one pool of servers, which serves one policy at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Capabilities, Completion, Prompt, SamplingParams
from agent_r1.core.threads import run_in_thread
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.canary import compute_canary
from agent_r1.inference.pool import EnginePool
from agent_r1.inference.server_process import Server
from agent_r1.inference.weight_folders import WeightFolders
from agent_r1.model.adapter import has_adapter, merged_copy


class SharedPool:
    """A pool of servers that several policies use in turn, such as the trained policy and its base model.

    Args:
        stop: called when the last engine on the pool is closed. The call can take seconds.
        servers: the processes of the servers, in the order of the pool; () if another program started them.
    """

    def __init__(self, pool: EnginePool, stop: Callable[[], None], servers: Sequence[Server] = ()) -> None:
        self.pool, self.servers = pool, tuple(servers)
        self._stop = stop
        self._engines = 0
        self._owner: PolicyEngine | None = None
        self._running = 0
        self._idle = asyncio.Event()
        self._switching = asyncio.Lock()

    def open(self) -> None:
        """Register an engine that uses the pool. The engine must call :meth:`close` at its end."""
        self._engines += 1

    async def close(self) -> None:
        self._engines -= 1
        if self._engines == 0:
            await self.pool.close()
            await run_in_thread(self._stop)

    @asynccontextmanager
    async def turn(self, engine: PolicyEngine) -> AsyncIterator[EnginePool]:
        """Return a context manager that gives the servers the weights of ``engine``'s policy, and yields the pool.

        The engines of other policies wait until the ``async with`` block ends.
        """
        while self._owner is not engine:
            async with self._switching:
                if self._owner is not engine:
                    await self._install(engine, await engine.current_weights())
        self._running += 1
        try:
            yield self.pool
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def update(self, engine: PolicyEngine, update: WeightUpdate) -> None:
        """Load new weights of ``engine``'s policy into the servers.

        Running generations of this policy continue with the new weights. Running generations of another policy are
        finished first.
        """
        async with self._switching:
            await self._install(engine, update)

    async def _install(self, engine: PolicyEngine, update: WeightUpdate) -> None:
        while self._owner is not engine and self._running:
            self._idle.clear()
            await self._idle.wait()
        self._owner = None
        await self.pool.update_weights(update)
        self._owner = engine


class PolicyEngine:
    """An ``InferenceEngine`` for one policy on a shared pool of servers.

    The weights are written to folders, from which the servers load them. ``model`` is served until the first update.
    """

    def __init__(self, shared: SharedPool, model: PreTrainedModel, folders: WeightFolders) -> None:
        self._shared, self._folders = shared, folders
        self._model: PreTrainedModel | None = model
        self._weights: WeightUpdate | None = None
        self._is_closed = False
        shared.open()

    @property
    def pool(self) -> EnginePool:
        return self._shared.pool

    @property
    def servers(self) -> tuple[Server, ...]:
        """The processes of the servers, in the order of the pool; () if this process did not start them."""
        return self._shared.servers

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._shared.pool.capabilities, transports=frozenset({"shared_memory"}))

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        async with self._shared.turn(self) as pool:
            return await pool.generate(prompt, params, session_id=session_id)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        if update.transport != "shared_memory" or not isinstance(update.handle, PreTrainedModel):
            raise EngineError(f"this engine takes a language model in shared memory, got {update.transport!r}")
        self._weights = await self._write(update.handle, update.version)
        self._model = None
        await self._shared.update(self, self._weights)
        return update.version

    async def current_weights(self) -> WeightUpdate:
        """Return the update that names the folder with the newest weights of the policy."""
        if self._weights is None:
            assert self._model is not None
            self._weights = await self._write(self._model, PolicyVersion(0, step=0))
            self._model = None
        return self._weights

    async def _write(self, model: PreTrainedModel, version: PolicyVersion) -> WeightUpdate:
        adapters = "lora" in self._shared.pool.capabilities.transports
        return await run_in_thread(partial(write_weights, self._folders, model, version, adapters=adapters))

    async def release(self, session_id: str) -> None:
        await self._shared.pool.release(session_id)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._shared.close()
            self._folders.close()


def write_weights(
    folders: WeightFolders, model: PreTrainedModel, version: PolicyVersion, *, adapters: bool
) -> WeightUpdate:
    """Write the weights of a model to a folder, and return the WeightUpdate that names the folder.

    An adapter is written alone if the servers accept ``adapters``. Otherwise it is merged into the written weights.
    Raise EngineError if the weights cannot be written.
    """
    if has_adapter(model) and adapters:
        return WeightUpdate(version, "lora", folders.write_adapter(model, version.number), compute_canary(model))
    whole = merged_copy(model) if has_adapter(model) else model
    return WeightUpdate(version, "safetensors", folders.write(whole, version.number), compute_canary(model))
