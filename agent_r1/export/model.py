"""Write models and adapters of a run to folders that transformers and peft can load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.core.errors import InvalidInput
from agent_r1.store.manifest import MANIFEST
from agent_r1.store.saved_weights import ADAPTER_CONFIG, SavedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NOT_OF_THE_MODEL = (MANIFEST, "trainer*.safetensors", "trainer.json", "progress.json", "monitor.json")
"""Patterns of files in saved folders that belong to the run, not to the model."""


def write_weights(folder: Path, weights: SavedWeights, as_adapter: bool) -> None:
    """Write a folder for ``from_pretrained``: the model with its tokenizer and chat template, or the LoRA adapter.

    A LoRA adapter is merged into the model. Raise InvalidInput if an adapter of a run without LoRA is asked for.
    """
    if as_adapter and not weights.is_adapter:
        do = "give --format model: only runs with --trainer.lora.rank have an adapter"
        raise InvalidInput("--format", got="adapter, of a run without LoRA", do=do)
    source = weights.folder if as_adapter or not weights.is_adapter else weights.merged
    if source is None:
        _write_merged(folder, weights.folder)
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(map(path.match, NOT_OF_THE_MODEL)):
            shutil.copyfile(path, folder / path.name)


def base_of_adapter(folder: Path) -> str:
    return str(json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"])


def _write_merged(folder: Path, adapter: Path) -> None:
    # Imported here, because the modules import torch.
    import torch

    from agent_r1.model.adapter import merged_copy, save_weights
    from agent_r1.model.load import load_images, load_model, load_tokenizer, quiet_transformers

    merged: PreTrainedModel = merged_copy(load_model(str(adapter), torch.float32))
    with quiet_transformers():
        save_weights(folder, merged, merged.state_dict())
        tokenizer = load_tokenizer(str(adapter))
        tokenizer.save_pretrained(folder)
        images = load_images(str(adapter), tokenizer)
        if images is not None:
            images.save_pretrained(folder)
