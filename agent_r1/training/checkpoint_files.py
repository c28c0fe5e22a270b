"""Models and checkpoints on disk.

The folder runs/NAME/checkpoints/step-K is a checkpoint. It contains:

- the policy in the format of Hugging Face; with LoRA, only the adapter
- trainer.safetensors, the tensors of the trainer (with several ranks: trainer-00001-of-00002.safetensors ..)
- trainer.json, the numbers of the trainer
- progress.json, the :class:`TrainProgress`
- monitor.json, the :class:`MonitorState`

The folder runs/NAME/model is the final model in the format of Hugging Face. With LoRA, the adapter is merged into the
model, and the folder model/adapter contains the adapter alone.

Each folder is complete or does not exist. Its manifest.json has hashes, which are checked when the folder is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.files import DISK, Disk, atomic_replace_dir, hidden_path, mark_for_removal, remove_leftovers
from agent_r1.model.adapter import has_adapter, merged_copy, save_weights, trained_weights
from agent_r1.model.load import quiet_transformers
from agent_r1.model.vision import ImageProcessor
from agent_r1.model.weights import TensorFiles, weights_checksum
from agent_r1.store.folder import DATABASE
from agent_r1.store.manifest import (
    CHECKPOINTS,
    MODEL,
    STEP,
    CorruptCheckpoint,
    ModelFingerprint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
    read_digest,
    sizes_match,
    write_manifest,
)
from agent_r1.store.saved_weights import ADAPTER
from agent_r1.trainer.protocol import TrainerState
from agent_r1.training.monitor import MonitorState
from agent_r1.training.sampling import SamplingState

_IGNORED_CONFIG = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of a model's configuration that do not change its outputs."""

_IGNORED_TOKENIZER = {"padding", "truncation"}
"""Entries of tokenizer.json that a call of the tokenizer can change."""


def fingerprint_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights_checksum: str
) -> ModelFingerprint:
    """Return the hashes that identify a model: its configuration, tokenizer, chat template and weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IGNORED_CONFIG}
    shapes = {name: [str(p.dtype), *p.shape] for name, p in model.named_parameters()}
    return ModelFingerprint(
        model=_hash_json(config | shapes),
        tokenizer=_hash_json(_tokenizer_content(tokenizer)),
        template=_hash_json(tokenizer.chat_template),
        weights=weights_checksum,
    )


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.get_vocab()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in content.items() if key not in _IGNORED_TOKENIZER}


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


T = TypeVar("T")

_TENSORS, _SCALARS, _PROGRESS, _MONITOR = "trainer.safetensors", "trainer.json", "progress.json", "monitor.json"
TRAINER_TENSORS = "trainer*.safetensors"
_STATE = "state"
CORRUPT = "corrupt"
"""The kind of the event that reports a corrupt checkpoint, and the prefix of its renamed folder."""


BRANCHED = "branched-"
"""The prefix of an empty file beside a checkpoint with which another run began, and which is therefore kept."""


class CheckpointError(AgentR1Error):
    """Raised if a model or a checkpoint cannot be written."""


@dataclass(frozen=True, slots=True)
class BestStep:
    step: int
    em: float


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The progress of a run."""

    step: int = 0  # the number of finished optimizer steps
    groups: int = 0  # the number of groups in the finished steps. The next group has this number as its id
    best: BestStep | None = None  # the best step so far; None if no step was validated
    validated: int = 0  # the last validated step; 0 for none
    not_better: int = 0  # the number of validations since the last one that was better than all before it
    sampling: SamplingState | None = None  # of adaptive sampling; None: the order of the tasks is fixed


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The content of a checkpoint on the CPU: copies, or the tensors of the run itself."""

    progress: TrainProgress
    weights: Mapping[str, Tensor]
    trainer: TrainerState
    monitor: MonitorState


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The content of a saved checkpoint, without the weights. ``read_weights(folder, ..)`` reads the weights."""

    progress: TrainProgress
    trainer: TrainerState
    monitor: MonitorState


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class LatestCheckpoint:
    """The newest intact checkpoint (None if there is none), and all newer checkpoints, which are corrupt."""

    folder: Path | None
    skipped: tuple[SkippedCheckpoint, ...]


def weights_on_cpu(model: PreTrainedModel, *, copy: bool = True) -> dict[str, Tensor]:
    """Return the model's trained weights on the CPU, by name: copies, or the model's own. Tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    state = {name: tensor.detach() for name, tensor in trained_weights(model).items()}
    for tensor in state.values():
        if tensor.data_ptr() not in moved:
            moved[tensor.data_ptr()] = tensor.to("cpu", copy=copy)
    return {name: moved[tensor.data_ptr()] for name, tensor in state.items()}


def save_model(
    run: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    disk: Disk = DISK,
    images: ImageProcessor | None = None,
) -> Path:
    """Write model (merged, and beside it the adapter if it has one), tokenizer and template to ``run/model``."""
    folder = run / MODEL
    with _write_errors(folder):
        remove_leftovers(folder, disk)
        fingerprint = fingerprint_model(model, tokenizer, weights_checksum(model))
        with _saving(run, folder, fingerprint, disk) as temporary:
            whole = merged_copy(model) if has_adapter(model) else model
            disk.write(temporary, lambda path: _save_pretrained(path, whole, tokenizer, images, whole.state_dict()))
            if whole is not model:
                weights = trained_weights(model)
                disk.write(temporary / ADAPTER, lambda path: _save_pretrained(path, model, tokenizer, images, weights))
    return folder


def save_checkpoint(
    run: Path,
    snapshot: Snapshot,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
    disk: Disk = DISK,
    images: ImageProcessor | None = None,
) -> Path:
    """Write the checkpoint ``run/checkpoints/step-K``, remove old checkpoints, and return the new folder.

    The newest ``keep`` complete checkpoints are kept. A run that resumes from a checkpoint also needs the weights of
    its best step, which is the step with the best validation result before the checkpoint was written. So, for each
    kept checkpoint, the checkpoint of the best step is kept too, and so are those with which other runs began.
    """
    folder = run / CHECKPOINTS / f"{STEP}{snapshot.progress.step}"
    fingerprint = fingerprint_model(model, tokenizer, str(snapshot.trainer.scalars["policy"]))
    with _write_errors(folder):
        remove_leftovers(folder.with_name(f"{STEP}*"), disk)
        with _saving(run, folder, fingerprint, disk) as temporary:
            _require_space(temporary, snapshot)
            disk.write(temporary, lambda path: _save_pretrained(path, model, tokenizer, images, snapshot.weights))
            _save_tensors(temporary, snapshot.trainer.tensors, disk)
            for name, content in (
                (_SCALARS, dict(snapshot.trainer.scalars)),
                (_PROGRESS, asdict(snapshot.progress)),
                (_MONITOR, asdict(snapshot.monitor)),
            ):
                text = json.dumps(content, indent=2)
                disk.write(temporary / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
        for old in _superfluous(run, snapshot.progress, keep):
            disk.remove(mark_for_removal(old, disk))
    return folder


def keep_for_branch(model: Path) -> None:
    """If the folder ``model`` is a checkpoint, let the run that wrote it keep it."""
    if model.parent.name == CHECKPOINTS:
        with suppress(OSError):  # a run that this user cannot change
            model.with_name(f"{BRANCHED}{model.name}").touch()


def load_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    """Return the content of the checkpoint in ``folder``."""
    try:
        saved = check_manifest(folder).fingerprint
    except CorruptCheckpoint as error:
        raise InvalidInput("checkpoint", got=str(error), do="use another checkpoint") from error
    current = fingerprint_model(model, tokenizer, saved.weights)
    for what, found, expected in (
        ("model", saved.model, current.model),
        ("tokenizer", saved.tokenizer, current.tokenizer),
        ("chat template", saved.template, current.template),
    ):
        if found != expected:
            do = f"continue with the {what} that the run was started with, or start a new run"
            raise InvalidInput("checkpoint", got=f"{folder}, which has another {what}", do=do)
    trainer = TrainerState(saved_tensors(folder), json.loads((folder / _SCALARS).read_text("utf-8")))
    return Checkpoint(_read(folder / _PROGRESS, TrainProgress), trainer, _read(folder / _MONITOR, MonitorState))


def saved_tensors(folder: Path) -> TensorFiles:
    """Return the trainer's tensors in a checkpoint. Each tensor is read from its file when it is needed."""
    return TensorFiles(sorted(folder.glob(TRAINER_TENSORS)))


def state_folder(run: Path, disk: Disk = DISK) -> Path:
    """Return the path of a new hidden folder, to which the ranks of a trainer can write their state."""
    remove_leftovers(run / CHECKPOINTS / _STATE, disk)
    return hidden_path(run / CHECKPOINTS / _STATE)


def find_latest_checkpoint(run: Path, check: Callable[[Path], object] = check_manifest) -> LatestCheckpoint:
    """Return the newest intact checkpoint, and the newer checkpoints that are not intact."""
    skipped: list[SkippedCheckpoint] = []
    for folder in list_checkpoints(run):
        try:
            check(folder)
        except CorruptCheckpoint as error:
            skipped.append(SkippedCheckpoint(folder, str(error)))
        else:
            return LatestCheckpoint(folder, tuple(skipped))
    return LatestCheckpoint(None, tuple(skipped))


def quarantine(folder: Path, disk: Disk = DISK) -> Path:
    """Rename the folder of a corrupt checkpoint, so that it no longer counts as a checkpoint. Return the new path."""
    names = (f"{CORRUPT}{count or ''}-{folder.name}" for count in itertools.count())
    new = next(path for name in names if not (path := folder.with_name(name)).exists())
    disk.rename(folder, new)
    disk.sync(folder.parent)
    return new


@contextmanager
def _saving(run: Path, folder: Path, fingerprint: ModelFingerprint, disk: Disk) -> Iterator[Path]:
    with atomic_replace_dir(folder, disk) as temporary:
        yield temporary
        write_manifest(temporary, fingerprint, read_digest(run / DATABASE), disk)


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, sqlite3.Error) as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error


def _save_pretrained(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
    weights: Mapping[str, Tensor],
) -> None:
    with quiet_transformers():
        save_weights(folder, model, weights)
        tokenizer.save_pretrained(folder)
        if images is not None:
            images.save_pretrained(folder)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], disk: Disk) -> None:
    if not isinstance(tensors, TensorFiles):
        disk.write(folder / _TENSORS, lambda path: save_file(dict(tensors), path))
        return
    for file in tensors.files:
        disk.rename(file, folder / file.name)
    for parent in {file.parent for file in tensors.files}:
        disk.remove(parent)


def _require_space(folder: Path, snapshot: Snapshot) -> None:
    state = snapshot.trainer.tensors
    unsaved = () if isinstance(state, TensorFiles) else state.values()
    # Tied weights count once, because the checkpoint stores them once.
    tensors = {t.data_ptr(): t.nbytes for t in (*snapshot.weights.values(), *unsaved)}
    needed, free = sum(tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"it takes {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free on the disk")


def _superfluous(run: Path, progress: TrainProgress, keep: int) -> list[Path]:
    folders = list_checkpoints(run)
    newest = [folder for folder in folders if sizes_match(folder)][:keep]
    kept = [progress, *(_read(folder / _PROGRESS, TrainProgress) for folder in newest)]
    steps = {one.step for one in kept} | {one.best.step for one in kept if one.best is not None}
    old = (folder for folder in folders if checkpoint_step(folder) not in steps)
    return [folder for folder in old if not folder.with_name(f"{BRANCHED}{folder.name}").exists()]


def _read(path: Path, kind: type[T]) -> T:
    return TypeAdapter(kind).validate_python(json.loads(path.read_text("utf-8")))
