"""Send new weights to an engine, by a transport that the engine supports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.threads import run_in_thread
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.weight_folders import WeightFolders
from agent_r1.model.adapter import has_adapter, merged_copy
from agent_r1.model.weights import DTYPES, weights_checksum


class WeightPublisher:
    """A service that sends the trainer's weights to an engine.

    If engine and trainer share memory, the engine gets the trainer's model, with its adapter (if the model has an
    adapter). Otherwise the adapter is merged into the weights, and the weights are written to a folder
    (:class:`~agent_r1.inference.weight_folders.WeightFolders`).
    """

    def __init__(self, engine: InferenceEngine, run_folder: Path) -> None:
        self._engine = engine
        self._folders = WeightFolders(run_folder, engine.capabilities.dtype)

    async def publish(self, update: WeightUpdate) -> PolicyVersion:
        """Send the weights of ``update`` to the engine, and return the version of the engine's weights.

        If the engine serves the sent weights, the result is ``update.version``. Any other result shows that the engine
        serves different weights.

        Raises EngineError if the weights cannot be written or loaded, or if the engine does not support
        ``update.transport``.
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
        """Return a copy of ``update`` for the engine. The copy differs from ``update`` in these cases:

        - If the engine cannot compute checksums, the copy has no checksum.
        - If engine and trainer do not share memory, and the model has an adapter, the copy has a model with this
          adapter merged into its weights.
        - If the merge or the engine's data type changes the weights, the copy has the checksum of the changed weights.

        The last two cases are possible only if ``update.handle`` is a model.
        """
        capabilities, model = self._engine.capabilities, update.handle
        if not capabilities.checksum:
            update = replace(update, version=replace(update.version, checksum=None))
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
        self._folders.close()

    def _write(self, update: WeightUpdate) -> Path:
        assert isinstance(update.handle, PreTrainedModel)
        return self._folders.write(update.handle, update.version.number)
