"""Models and learner states on disk: whole or absent, checked by hashes, safetensors and JSON only.

runs/NAME/checkpoints/step-K/   a Hugging Face folder, with learner.safetensors, learner.json, manifest.json
runs/NAME/model/                a Hugging Face folder, with manifest.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.learn.learner import LearnerState
from agent_r1.model.load import quiet
from agent_r1.store.disk import appearing

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
MODEL, CHECKPOINTS = "model", "checkpoints"
TENSORS, SCALARS = "learner.safetensors", "learner.json"


class CheckpointError(AgentR1Error):
    """A model or a checkpoint could not be written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says of a file."""

    size: int
    sha256: str


def save_model(run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write ``run/model``, which ``from_pretrained`` loads, chat template included. Raises CheckpointError."""
    with _saving(run / MODEL) as folder:
        _save_pretrained(folder, model, tokenizer)
    return run / MODEL


def save_checkpoint(
    run: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: LearnerState,
    keep: int = 2,
) -> Path:
    """Write ``run/checkpoints/step-K``, then remove all whole checkpoints but the newest ``keep``.

    Nothing is removed before the new one is on the disk, and nothing that is damaged counts as kept.
    Raises CheckpointError; what was there before is then still there.
    """
    folder = run / CHECKPOINTS / f"step-{step}"
    _clear_leftovers(folder.parent)
    with _saving(folder) as half:
        _save_pretrained(half, model, tokenizer)
        save_file(dict(state.tensors), half / TENSORS)
        (half / SCALARS).write_text(json.dumps(dict(state.scalars), indent=2), encoding="utf-8")
    whole = [older for older in checkpoints(run) if _sizes_fit(older)]
    for older in whole[keep:]:
        _remove(older)
    return folder


def load_learner_state(folder: Path) -> LearnerState:
    """The learner's state in a checkpoint. Raises InvalidInput where the checkpoint is not whole."""
    problems = check_manifest(folder)
    if problems:
        raise InvalidInput("checkpoint", got=f"{folder}: {problems[0]}", do="use another checkpoint")
    return LearnerState(tensors=load_file(folder / TENSORS), scalars=json.loads((folder / SCALARS).read_text("utf-8")))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first, whole or not."""
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def trained_model(run: Path) -> Path:
    """A run's final model, or else its newest whole checkpoint. Raises InvalidInput where it saved none."""
    for folder in (run / MODEL, *checkpoints(run)):
        if folder.is_dir() and not check_manifest(folder):
            return folder
    do = "let it train to its end, or set checkpoint_every"
    raise InvalidInput("model", got=f"the run {run}, which has saved no whole model", do=do)


def check_manifest(folder: Path) -> tuple[str, ...]:
    """What is wrong with a saved folder: files that miss, were changed or were added; () where it is whole."""
    try:
        listed = _listed(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (f"{MANIFEST} cannot be read: {error!r}",)
    found = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    missing = [f"{name} is missing" for name in listed if name not in found]
    added = [f"{name} is not in the manifest" for name in found if name not in listed]
    changed = [
        f"{name} has changed" for name, entry in listed.items() if name in found and _entry(found[name]) != entry
    ]
    return (*missing, *added, *changed)


@contextmanager
def _saving(folder: Path) -> Iterator[Path]:
    """A folder to fill; it appears under its name, with a manifest, when the block ends."""
    try:
        with appearing(folder) as half:
            yield half
            entries = {path.relative_to(half).as_posix(): asdict(_entry(path)) for path in sorted(_files(half))}
            manifest = {"format": MANIFEST_FORMAT, "files": entries}
            (half / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error


def _save_pretrained(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        return Entry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _listed(folder: Path) -> Mapping[str, Entry]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != MANIFEST_FORMAT:
        raise ValueError(f"format {manifest['format']}; this version reads format {MANIFEST_FORMAT}")
    return {name: Entry(**entry) for name, entry in manifest["files"].items()}


def _sizes_fit(folder: Path) -> bool:
    """A quick look, without hashing gigabytes."""
    try:
        return all((folder / name).stat().st_size == entry.size for name, entry in _listed(folder).items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or removal left half done."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    # Renamed first: a kill in between then leaves no folder that looks like a checkpoint.
    doomed = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
