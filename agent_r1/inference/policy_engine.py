"""Engines for several policies on one pool of servers, which serves one policy at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from agent_r1.core.errors import EngineError
from agent_r1.core.files import TemporaryFolder, remove_abandoned
from agent_r1.core.inference import (
    AdapterFolders,
    Capabilities,
    Completion,
    Dtype,
    PolicyVersion,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.threads import run_in_thread
from agent_r1.inference.canary import compute_canary
from agent_r1.inference.pool import EnginePool
from agent_r1.inference.server_process import Server
from agent_r1.inference.vllm_worker.agent_r1_weights import CHECKSUM, folder_checksum
from agent_r1.model.adapter import has_adapter, merged_copy, save_weights, trained_weights, without_adapter
from agent_r1.model.load import quiet_transformers
from agent_r1.model.weights import DTYPES

SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 2
"""The number of weight folders that are kept. An engine may still be reading the second newest folder."""

BASE = "base"
"""The name of the folder with the frozen weights to which the adapters belong."""

PREFIX = "agent-r1-weights-"

ONLY_SHARD_NAME, HEAD_NAME = "model-body.safetensors", "model-head.safetensors"
"""If a tied output head is also written as a separate tensor: the file of all other weights, and of the head."""


class WeightFolders:
    """A writer of a model's weights. Each version gets a folder of its own, and the newest two folders are kept.

    A folder gets its final name after all its files are written. If only an adapter is trained, the frozen weights are
    written once. If not ``tied``, a tied output head is also written as a separate tensor, which some servers need.
    """

    def __init__(self, parent: Path, dtype: Dtype | None, *, tied: bool = True, shared_memory: bool = True) -> None:
        self._parent, self._dtype, self._tied, self._shared_memory = parent, dtype, tied, shared_memory
        self._root: TemporaryFolder | None = None
        self._folders: list[Path] = []
        self._base: Path | None = None

    def write(self, model: PreTrainedModel, number: int) -> Path:
        """Write the weights of ``model`` as one version, and return the folder of this version."""
        return self._keep(self._write(model, f"version-{number}", lambda folder: self._save(model, folder)))

    def write_adapter(self, model: PreTrainedModel, number: int) -> AdapterFolders:
        """Write the adapter as one version, at first also the frozen weights, and return both folders."""
        if self._base is None:
            base = without_adapter(model)
            self._base = self._write(base, BASE, lambda folder: self._save(base, folder))

        def save(folder: Path) -> None:
            save_weights(folder, model, trained_weights(model))

        return AdapterFolders(self._keep(self._write(model, f"version-{number}", save)), self._base)

    def close(self) -> None:
        if self._root is not None:
            self._root.remove()

    def _write(self, model: PreTrainedModel, name: str, save: Callable[[Path], None]) -> Path:
        try:
            if self._root is None:
                self._root = self._make_root(model)
            folder = self._root.path / name
            temporary = folder.with_suffix(".tmp")
            save(temporary)
            if folder in self._folders:
                self._folders.remove(folder)
                shutil.rmtree(folder)
            temporary.rename(folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights could not be written for the engine: {error}") from error
        return folder

    def _save(self, model: PreTrainedModel, folder: Path) -> None:
        weights = self._weights(model)
        with quiet_transformers():
            model.save_pretrained(folder, state_dict=dict(weights))  # it empties the dictionary that it gets
        if not self._tied:
            _untie(model, weights, folder)
        (folder / CHECKSUM).write_text(folder_checksum(folder), "ascii")

    def _keep(self, folder: Path) -> Path:
        self._folders.append(folder)
        while len(self._folders) > KEPT_VERSIONS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
        return folder

    def _make_root(self, model: PreTrainedModel) -> TemporaryFolder:
        if not self._shared_memory or not SHARED_MEMORY.is_dir():
            return TemporaryFolder(PREFIX, self._parent)
        remove_abandoned(PREFIX, SHARED_MEMORY)  # before the free memory is read
        needed = (KEPT_VERSIONS + 1) * sum(tensor.nbytes for tensor in model.state_dict().values())
        fits = shutil.disk_usage(SHARED_MEMORY).free > needed
        return TemporaryFolder(PREFIX, SHARED_MEMORY if fits else self._parent)

    def _weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        state = model.state_dict()
        if self._dtype is None:
            return state
        cast = {tensor.data_ptr(): tensor.to(DTYPES[self._dtype]) for tensor in state.values()}
        return {name: cast[tensor.data_ptr()] for name, tensor in state.items()}


def _untie(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
    if not model.config.get_text_config().tie_word_embeddings:
        return
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head) + ".weight"
    save_file({name: weights[name].detach().cpu().contiguous().clone()}, folder / HEAD_NAME, {"format": "pt"})
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        shards = json.loads(index.read_text("utf-8"))
    else:
        (folder / SAFE_WEIGHTS_NAME).rename(folder / ONLY_SHARD_NAME)
        with safe_open(folder / ONLY_SHARD_NAME, "pt") as opened:
            shards = {"metadata": {}, "weight_map": dict.fromkeys(opened.keys(), ONLY_SHARD_NAME)}
    shards["weight_map"][name] = HEAD_NAME
    index.write_text(json.dumps(shards), "utf-8")
    for part in (config, config.get("text_config")):
        if part is not None:
            part["tie_word_embeddings"] = False
    (folder / CONFIG_NAME).write_text(json.dumps(config), "utf-8")


class SharedPool:
    """A pool of servers that several policies use in turn. ``stop`` is called when the last engine is closed."""

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
        """Give the servers the weights of ``engine``, and yield the pool. Other engines wait until the block ends."""
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
        """Load new weights of ``engine``'s policy into the servers."""
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
    """An ``InferenceEngine`` for one policy on a shared pool of servers, which load its weights from folders."""

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
    """Write the adapter, or the weights with the adapter merged, to a folder. Raise EngineError if this fails."""
    if has_adapter(model) and adapters:
        return WeightUpdate(version, "lora", folders.write_adapter(model, version.number), compute_canary(model))
    whole = merged_copy(model) if has_adapter(model) else model
    return WeightUpdate(version, "safetensors", folders.write(whole, version.number), compute_canary(model))
