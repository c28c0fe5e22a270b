"""Bring new weights to an engine, by a transport that it supports."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.threads import run_in_thread
from agent_r1.core.weights import PolicyVersion, WeightUpdate

SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 2
"""Folders of weights that stay: the engine may still read the one before the newest."""


class WeightPublisher:
    """Sends weight updates to an engine.

    An engine in this process takes the trainer's module. For one that does not share memory, the weights are written as
    a safetensors folder (in /dev/shm if there is one, else beside the run), complete before it gets its name.
    """

    def __init__(self, engine: InferenceEngine, run_folder: Path) -> None:
        self._engine = engine
        self._run_folder = run_folder
        self._root: Path | None = None
        self._folders: list[Path] = []

    async def publish(self, update: WeightUpdate) -> PolicyVersion:
        """Send the weights; return the version that the engine then serves. Raises EngineError if it cannot."""
        transports = self._engine.capabilities.transports
        if update.transport in transports:
            return await self._engine.update_weights(update)
        if update.transport == "shared_memory" and "safetensors" in transports:
            folder = await run_in_thread(self._write, update)
            return await self._engine.update_weights(replace(update, transport="safetensors", handle=folder))
        raise EngineError(f"the trainer publishes by {update.transport!r}, and the engine takes {sorted(transports)}")

    def close(self) -> None:
        """Remove the folders of weights."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _make_root(self, model: PreTrainedModel) -> Path:
        """Return a new folder in shared memory, or beside the run if shared memory has too little room."""
        needed = (KEPT_VERSIONS + 1) * sum(tensor.nbytes for tensor in model.state_dict().values())
        fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
        return Path(tempfile.mkdtemp(prefix="agent-r1-weights-", dir=SHARED_MEMORY if fits else self._run_folder))

    def _write(self, update: WeightUpdate) -> Path:
        assert isinstance(update.handle, PreTrainedModel)
        try:
            if self._root is None:
                self._root = self._make_root(update.handle)
            folder = self._root / f"version-{update.version.number}"
            if folder in self._folders:
                return folder
            temporary = folder.with_suffix(".tmp")
            update.handle.save_pretrained(temporary)
            temporary.rename(folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights could not be written for the engine: {error}") from error
        self._folders.append(folder)
        while len(self._folders) > KEPT_VERSIONS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
        return folder
