"""Folders of safetensors files, from which engines in other processes load weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from agent_r1.core.errors import EngineError
from agent_r1.core.temporary_folders import TemporaryFolder, remove_abandoned
from agent_r1.core.weights import AdapterFolders, Dtype
from agent_r1.model.adapter import save_weights, trained_weights, without_adapter
from agent_r1.model.load import quiet_transformers
from agent_r1.model.weights import DTYPES

SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 2
"""The number of weight folders that are kept. An engine may still be reading the second newest folder."""

BASE = "base"
"""The name of the folder with the frozen weights to which the adapters belong."""

PREFIX = "agent-r1-weights-"

ONLY_SHARD_NAME, HEAD_NAME = "model-body.safetensors", "model-head.safetensors"
"""Names of two files in a folder of weights, if a tied output head is also written as a separate tensor.

``HEAD_NAME`` holds the output head. If all other weights are in one file, this file has the name ``ONLY_SHARD_NAME``.
"""


class WeightFolders:
    """A writer of a model's weights. Each version gets a folder of its own, and the newest two folders are kept.

    A folder gets its final name after all its files are written. If only an adapter is trained, the frozen weights are
    written once.

    Args:
        parent: the folder in which the folders of the versions are made, unless /dev/shm is used.
        shared_memory: whether to use /dev/shm if /dev/shm has enough room.
        dtype: the data type of the written weights; None: the data type of the model.
        tied: how to write a tied output head, which shares its weights with the input embeddings. True: the shared
            weights are written only once. False: the head is also written as a separate tensor. Some servers need the
            separate tensor to update the head.
    """

    def __init__(self, parent: Path, dtype: Dtype | None, *, tied: bool = True, shared_memory: bool = True) -> None:
        self._parent, self._dtype, self._tied, self._shared_memory = parent, dtype, tied, shared_memory
        self._root: TemporaryFolder | None = None
        self._folders: list[Path] = []
        self._base: Path | None = None

    def write(self, model: PreTrainedModel, number: int) -> Path:
        """Write the weights of ``model`` as one version, and return the folder of this version.

        ``number`` is the number of the version. An existing folder of this version is replaced: a run that goes back to
        a checkpoint writes the versions after the checkpoint again. Raise EngineError if the weights cannot be written.
        """
        return self._keep(self._write(model, f"version-{number}", lambda folder: self._save(model, folder)))

    def write_adapter(self, model: PreTrainedModel, number: int) -> AdapterFolders:
        """Write the adapter of ``model`` as one version. Return the folders of the adapter and of the frozen weights.

        ``number`` is the number of the version. The first call also writes the frozen weights. Raise EngineError if the
        weights cannot be written.
        """
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
        """Write a folder with ``save``, and return the path of the folder.

        ``name`` is the name of the folder. An existing folder with this name is replaced.
        """
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
        """Return the weights by name, in the data type of the files. Two names of tied weights have the same tensor."""
        state = model.state_dict()
        if self._dtype is None:
            return state
        cast = {tensor.data_ptr(): tensor.to(DTYPES[self._dtype]) for tensor in state.values()}
        return {name: cast[tensor.data_ptr()] for name, tensor in state.items()}


def _untie(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tied output head of ``model`` to ``folder`` as a separate tensor. If the head is not tied, do nothing.

    A tied head shares its weights with the input embeddings. The configuration in ``folder`` is changed, and declares
    that the head is not tied.
    """
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
