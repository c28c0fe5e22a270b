"""Write models and adapters of a run to folders that transformers and peft can load."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.core.errors import InvalidInput
from agent_r1.store.manifest import (
    MANIFEST,
    MODEL,
    CorruptCheckpoint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
)
from agent_r1.store.reader import RunReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_CONFIG = "adapter_config.json"

NOT_OF_THE_MODEL = (MANIFEST, "trainer*.safetensors", "trainer.json", "progress.json", "monitor.json")
"""Patterns of files in saved folders that belong to the run, not to the model."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The weights that a run saved after a step."""

    folder: Path  # the folder of the model; with LoRA, of the adapter
    step: int
    is_best: bool  # whether ``step`` is the best step by validation
    merged: Path | None = None  # the folder of the model with the merged adapter; None if the run saved none

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


def find_weights(run: Path, reader: RunReader, checkpoint: str) -> SavedWeights:
    """Return the saved weights that ``checkpoint`` selects: "best", "last", or the number of a step.

    Raise InvalidInput if the run has not saved these weights, or if they are damaged.
    """
    best = best_step(reader)
    checkpoints = list_checkpoints(run)
    final_step = reader.last_step() if best is None else best
    has_final = _is_intact(run / MODEL) and (reader.is_complete() or not checkpoints)
    if has_final and (checkpoint == "best" or (checkpoint == "last" and not checkpoints and best is None)):
        adapter = run / MODEL / "adapter"
        return SavedWeights(adapter if adapter.is_dir() else run / MODEL, final_step, best is not None, run / MODEL)
    intact = {checkpoint_step(folder): folder for folder in checkpoints if _is_intact(folder)}
    newest = max(intact, default=-1)
    step = best if checkpoint == "best" and best in intact else newest
    if checkpoint not in ("best", "last"):
        step = next((each for each in intact if str(each) == checkpoint), -1)
    if step not in intact:
        there = ", ".join(map(str, sorted(intact))) or "none"
        do = f"choose best, last or a step with an intact checkpoint; there are: {there}"
        raise InvalidInput("--checkpoint", got=f"{checkpoint} of {run}, which has no such weights", do=do)
    return SavedWeights(intact[step], step, step == best)


def best_step(reader: RunReader) -> int | None:
    """Return the step with the best exact match in validation, or None without a validation."""
    validated = reader.curve("validation_em")
    return max(validated, key=lambda step: (validated[step], step), default=None)


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


def _is_intact(folder: Path) -> bool:
    try:
        check_manifest(folder)
    except CorruptCheckpoint:
        return False
    return True
