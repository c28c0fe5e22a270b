"""Send new weights to an engine, by a transport that the engine supports."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.threads import run_in_thread
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.model.adapter import has_adapter, merged_copy
from agent_r1.model.checksum import weights_checksum
from agent_r1.model.precision import DTYPES

SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 2
"""Number of newest weight folders that are kept. The engine can still be reading the second newest folder."""


class WeightPublisher:
    """A service that sends the trainer's weights to an engine.

    If the engine and the trainer share memory, the engine gets the trainer's model, with the adapter if there is one.

    Otherwise the weights are written to a safetensors folder for the engine. An adapter is merged into the written
    weights. The folder is in /dev/shm, or in the run's folder if /dev/shm has too little room. Until all files are
    written, the folder has a temporary name.

    The engine gets the checksum of the weights in the form in which it serves them. This checksum differs from the
    trainer's checksum if an adapter was merged, or if the engine converts the weights to another data type.

    Args:
        engine: the engine that gets the weights.
        run_folder: the folder of the run.
    """

    def __init__(self, engine: InferenceEngine, run_folder: Path) -> None:
        self._engine = engine
        self._run_folder = run_folder
        self._root: Path | None = None
        self._folders: list[Path] = []

    async def publish(self, update: WeightUpdate) -> PolicyVersion:
        """Send the weights of ``update`` to the engine, and return the version that the engine serves afterwards.

        If the engine serves the sent weights, the returned version is ``update.version``, with the trainer's checksum.

        Raises EngineError if the engine supports no suitable transport, or if the weights cannot be written or loaded.
        """
        transports = self._engine.capabilities.transports
        sent = await run_in_thread(self._for_engine, update)
        if update.transport in transports:
            served = await self._engine.update_weights(sent)
        elif update.transport == "shared_memory" and "safetensors" in transports:
            folder = await run_in_thread(self._write, sent)
            served = await self._engine.update_weights(replace(sent, transport="safetensors", handle=folder))
        else:
            got = f"the trainer publishes by {update.transport!r}"
            raise EngineError(f"{got}, and the engine takes {sorted(transports)}")
        return update.version if served == sent.version else served

    def _for_engine(self, update: WeightUpdate) -> WeightUpdate:
        """Convert an update of the trainer to the update for the engine.

        - An adapter is merged into the model if engine and trainer do not share memory.
        - If ``update`` has a checksum, the result has the checksum of the model in the engine's data type.

        If the handle of ``update`` is not a model, return ``update`` unchanged.
        """
        capabilities, model = self._engine.capabilities, update.handle
        if not isinstance(model, PreTrainedModel):
            return update
        if update.transport not in capabilities.transports and has_adapter(model):
            model = merged_copy(model)
        dtype = None if capabilities.dtype is None else DTYPES[capabilities.dtype]
        is_cast = dtype is not None and any(parameter.dtype != dtype for parameter in model.parameters())
        if update.version.checksum is None or (model is update.handle and not is_cast):
            return replace(update, handle=model)
        return replace(update, version=replace(update.version, checksum=weights_checksum(model, dtype)), handle=model)

    def close(self) -> None:
        """Remove all folders of weights that were written."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _make_root(self, model: PreTrainedModel) -> Path:
        """Return a new folder: in shared memory, or in the run's folder if shared memory has too little room."""
        needed = (KEPT_VERSIONS + 1) * sum(tensor.nbytes for tensor in model.state_dict().values())
        fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
        return Path(tempfile.mkdtemp(prefix="agent-r1-weights-", dir=SHARED_MEMORY if fits else self._run_folder))

    def _weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the weights by name, in the engine's data type. Tied weights stay tied."""
        dtype = self._engine.capabilities.dtype
        state = model.state_dict()
        if dtype is None:
            return state
        cast = {tensor.data_ptr(): tensor.to(DTYPES[dtype]) for tensor in state.values()}
        return {name: cast[tensor.data_ptr()] for name, tensor in state.items()}

    def _write(self, update: WeightUpdate) -> Path:
        assert isinstance(update.handle, PreTrainedModel)
        try:
            if self._root is None:
                self._root = self._make_root(update.handle)
            folder = self._root / f"version-{update.version.number}"
            if folder in self._folders:
                return folder
            temporary = folder.with_suffix(".tmp")
            update.handle.save_pretrained(temporary, state_dict=self._weights(update.handle))
            temporary.rename(folder)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights could not be written for the engine: {error}") from error
        self._folders.append(folder)
        while len(self._folders) > KEPT_VERSIONS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
        return folder
