"""Models and checkpoints on disk: whole or absent, checked by hashes, safetensors and JSON only.

runs/NAME/checkpoints/step-K/   a Hugging Face folder, with learner.safetensors and .json, position.json, doctor.json
runs/NAME/model/                a Hugging Face folder
Each has a manifest.json.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.model.checksum import weights_checksum
from agent_r1.model.load import quiet
from agent_r1.store.atomic_fs import DISK, Disk, remove_leftovers, hide, atomic_replace_dir
from agent_r1.store.manifest import (
    CHECKPOINTS,
    MODEL,
    STEP,
    CorruptCheckpoint,
    ModelFingerprint,
    check_manifest,
    checkpoints,
    sizes_match,
    checkpoint_step,
    write_manifest,
)
from agent_r1.trainer.learner import LearnerState
from agent_r1.training.checkpoint.fingerprint import fingerprint_model
from agent_r1.training.monitor.state import MonitorState

T = TypeVar("T")

TENSORS, SCALARS, POSITION, DOCTOR = "learner.safetensors", "learner.json", "position.json", "doctor.json"
DAMAGED = "damaged"


class CheckpointError(AgentR1Error):
    """A model or a checkpoint could not be written."""


@dataclass(frozen=True, slots=True)
class BestStep:
    """The step whose weights did best on validation, and their exact match there."""

    step: int
    em: float


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Where a run stands: the optimizer steps taken, the groups they took (the next group's serial number), the best
    step so far where anything was validated, and the last step that was."""

    step: int = 0
    groups: int = 0
    best: BestStep | None = None
    validated: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Everything a checkpoint holds, as copies on the CPU that no later step touches."""

    position: TrainProgress
    weights: Mapping[str, Tensor]
    learner: LearnerState
    doctor: MonitorState


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint read back. The weights are the model that ``load_model(str(folder), ..)`` gives."""

    folder: Path
    position: TrainProgress
    learner: LearnerState
    doctor: MonitorState


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that cannot be used, and why."""

    folder: Path
    damage: str


@dataclass(frozen=True, slots=True)
class LatestCheckpoint:
    """The newest whole checkpoint, None where there is none, and each newer one."""

    folder: Path | None
    skipped: tuple[SkippedCheckpoint, ...]


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights, copied to the CPU. Weights that are shared (tied embeddings) stay so."""
    copies: dict[int, Tensor] = {}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for tensor in state.values():
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.to("cpu", copy=True)
    return {name: copies[tensor.data_ptr()] for name, tensor in state.items()}


def save_model(run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, disk: Disk = DISK) -> Path:
    """Write ``run/model``, which ``from_pretrained`` loads, chat template included. Raises CheckpointError."""
    folder = run / MODEL
    with _explained(folder):
        remove_leftovers(folder, disk)
        with _saving(folder, fingerprint_model(model, tokenizer, weights_checksum(model)), disk) as half:
            disk.write(half, lambda place: _save_pretrained(place, model, tokenizer, model.state_dict()))
    return folder


def save_checkpoint(
    run: Path,
    snapshot: Snapshot,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
    disk: Disk = DISK,
) -> Path:
    """Write ``run/checkpoints/step-K``, then remove all others but the newest ``keep`` and the best of each of these.

    Of ``model`` only its configuration is read. Nothing is removed before the new one is on the disk, and nothing
    that is damaged counts as kept. Raises CheckpointError; what was there before is then still there.
    """
    folder = run / CHECKPOINTS / f"{STEP}{snapshot.position.step}"
    identity = fingerprint_model(model, tokenizer, str(snapshot.learner.scalars["policy"]))
    with _explained(folder):
        remove_leftovers(folder.with_name(f"{STEP}*"), disk)
        with _saving(folder, identity, disk) as half:
            _require_space(half, snapshot)
            disk.write(half, lambda place: _save_pretrained(place, model, tokenizer, snapshot.weights))
            disk.write(half / TENSORS, lambda place: save_file(dict(snapshot.learner.tensors), place))
            disk.write(half / SCALARS, lambda place: _put_json(place, dict(snapshot.learner.scalars)))
            disk.write(half / POSITION, lambda place: _put_json(place, asdict(snapshot.position)))
            disk.write(half / DOCTOR, lambda place: _put_json(place, asdict(snapshot.doctor)))
        for doomed in _superfluous(run, snapshot.position, keep):
            disk.remove(hide(doomed, disk))
    return folder


def find_latest_checkpoint(run: Path, check: Callable[[Path], object] = check_manifest) -> LatestCheckpoint:
    """The newest checkpoint of which ``check`` does not say that it is CorruptCheckpoint.

    Raises InvalidInput at one of another format.
    """
    skipped: list[SkippedCheckpoint] = []
    for folder in checkpoints(run):
        try:
            check(folder)
        except CorruptCheckpoint as damage:
            skipped.append(SkippedCheckpoint(folder, str(damage)))
        else:
            return LatestCheckpoint(folder, tuple(skipped))
    return LatestCheckpoint(None, tuple(skipped))


def quarantine(folder: Path, disk: Disk = DISK) -> Path:
    """Give a checkpoint that cannot be used a name under which it is none, and never in the way. Raises OSError."""
    names = (f"{DAMAGED}{count or ''}-{folder.name}" for count in itertools.count())
    aside = next(place for name in names if not (place := folder.with_name(name)).exists())
    disk.rename(folder, aside)
    disk.sync(folder.parent)
    return aside


def load_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    """Read a checkpoint of this model back.

    Raises InvalidInput where it is not whole, or is of another format, model, tokenizer or chat template.
    """
    try:
        found = check_manifest(folder).fingerprint
    except CorruptCheckpoint as damage:
        raise InvalidInput("checkpoint", got=str(damage), do="use another checkpoint") from damage
    here = fingerprint_model(model, tokenizer, found.weights)
    for what, saved, mine in (
        ("model", found.model, here.model),
        ("tokenizer", found.tokenizer, here.tokenizer),
        ("chat template", found.template, here.template),
    ):
        if saved != mine:
            do = f"go on with the {what} that the run was started with, or start a new run"
            raise InvalidInput("checkpoint", got=f"{folder}, which is of another {what}", do=do)
    learner = LearnerState(load_file(folder / TENSORS), json.loads((folder / SCALARS).read_text("utf-8")))
    return Checkpoint(folder, _read(folder / POSITION, TrainProgress), learner, _read(folder / DOCTOR, MonitorState))


def _read(place: Path, kind: type[T]) -> T:
    return TypeAdapter(kind).validate_python(json.loads(place.read_text("utf-8")))


def find_trained_model(run: Path) -> Path:
    """A run's final model, or else its newest whole checkpoint. Raises InvalidInput where it saved none."""
    try:
        check_manifest(run / MODEL)
        return run / MODEL
    except CorruptCheckpoint:
        folder = find_latest_checkpoint(run).folder
    if folder is None:
        do = "let it train to its end, or set checkpoint_every"
        raise InvalidInput("model", got=f"the run {run}, which has saved no whole model", do=do)
    return folder


@contextmanager
def _saving(folder: Path, identity: ModelFingerprint, disk: Disk) -> Iterator[Path]:
    """A folder to fill; it appears under its name, with a manifest, when the block ends."""
    with atomic_replace_dir(folder, disk) as half:
        yield half
        write_manifest(half, identity, disk)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What a disk refuses, or gives back as something else, as the one error of saving."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error


def _save_pretrained(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, Tensor]
) -> None:
    with quiet():
        model.save_pretrained(folder, state_dict=dict(weights))
        tokenizer.save_pretrained(folder)


def _put_json(place: Path, value: object) -> None:
    place.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _require_space(folder: Path, snapshot: Snapshot) -> None:
    """Raise OSError before anything is written where it could not fit."""
    tensors = {t.data_ptr(): t.nbytes for t in (*snapshot.weights.values(), *snapshot.learner.tensors.values())}
    needed, free = sum(tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"it takes {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free on the disk")


def _superfluous(run: Path, position: TrainProgress, keep: int) -> list[Path]:
    """The checkpoints to remove once that of ``position`` is on the disk."""
    there = checkpoints(run)
    newest = [folder for folder in there if sizes_match(folder)][:keep]
    kept = [position, *(_read(folder / POSITION, TrainProgress) for folder in newest)]
    steps = {here.step for here in kept} | {here.best.step for here in kept if here.best is not None}
    return [folder for folder in there if checkpoint_step(folder) not in steps]
