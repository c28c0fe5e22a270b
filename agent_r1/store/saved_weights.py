"""The weights that runs saved: find those that a model's name means, and the run from which a folder comes."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.store.folder import is_run, run_folder
from agent_r1.store.manifest import (
    CHECKPOINTS,
    MODEL,
    STEP,
    CorruptCheckpoint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from agent_r1.store.reader import RunReader

ADAPTER, ADAPTER_CONFIG = "adapter", "adapter_config.json"


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


@dataclass(frozen=True, slots=True)
class Parent:
    """The weights of another run with which a run began."""

    run: str  # the folder of the other run
    step: int
    weights: str  # the checksum of the weights


def named_run(model: str) -> tuple[Path, str] | None:
    """Return (folder of the run, which weights) if ``model`` is RUN or RUN@STEP; None if it names no run.

    RUN alone means the best weights. In the place of STEP, "best" and "last" are possible too.
    """
    if is_run(run_folder(model)):
        return run_folder(model), "best"
    name, _, step = model.rpartition("@")
    return (run_folder(name), step) if name and is_run(run_folder(name)) else None


def find_folder(model: str, merged: bool = False) -> str:
    """Return the folder with the weights that RUN or RUN@STEP means. Any other ``model`` is returned unchanged.

    ``merged``: with LoRA, the folder of the whole model, which a run saves at its end, instead of the adapter.
    """
    named = named_run(model)
    if named is None:
        return model
    with closing(RunReader(named[0])) as reader:
        weights = find_weights(named[0], reader, named[1])
    return str((weights.merged if merged else None) or weights.folder)


def find_parent(model: str) -> Parent | None:
    """Return the weights of a run that are in the folder ``model``; None if the folder belongs to no run."""
    folder = Path(model)
    is_checkpoint = folder.parent.name == CHECKPOINTS and folder.name.startswith(STEP)
    run = folder.parent.parent if is_checkpoint else folder.parent
    if not is_run(run) or not (is_checkpoint or folder.name == MODEL):
        return None
    with closing(RunReader(run)) as reader:
        step = checkpoint_step(folder) if is_checkpoint else best_step(reader) or reader.last_step()
    return Parent(os.path.abspath(run), step, read_manifest(folder).fingerprint.weights)


def find_weights(run: Path, reader: RunReader, checkpoint: str) -> SavedWeights:
    """Return the saved weights that ``checkpoint`` selects: "best", "last", or the number of a step.

    Raise InvalidInput if the run has not saved these weights, or if they are damaged.
    """
    best = best_step(reader)
    checkpoints = list_checkpoints(run)
    final_step = reader.last_step() if best is None else best
    has_final = _is_intact(run / MODEL) and (reader.is_complete() or not checkpoints)
    if has_final and (checkpoint == "best" or (checkpoint == "last" and not checkpoints and best is None)):
        adapter = run / MODEL / ADAPTER
        return SavedWeights(adapter if adapter.is_dir() else run / MODEL, final_step, best is not None, run / MODEL)
    folders = {checkpoint_step(folder): folder for folder in checkpoints}  # newest first
    wanted = list(folders) if checkpoint in ("best", "last") else [step for step in folders if str(step) == checkpoint]
    if checkpoint == "best" and best in folders:
        wanted.insert(0, best)
    step = next((each for each in wanted if _is_intact(folders[each])), None)  # hashing others would take long
    if step is None:
        intact = [each for each in reversed(folders) if _is_intact(folders[each])]
        there = ", ".join(map(str, intact)) or "none, because checkpoint_every is 0, or no step was saved yet"
        do = f"choose best, last or a step with an intact checkpoint; there are: {there}"
        raise InvalidInput("weights", got=f"{checkpoint} of {run}, which has no such weights", do=do)
    return SavedWeights(folders[step], step, step == best)


def best_step(reader: RunReader) -> int | None:
    """Return the step with the best exact match in validation, or None without a validation."""
    validated = reader.curve("validation_em")
    return max(validated, key=lambda step: (validated[step], step), default=None)


def _is_intact(folder: Path) -> bool:
    try:
        check_manifest(folder)
    except CorruptCheckpoint:
        return False
    return True
