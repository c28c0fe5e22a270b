"""T2: the process is killed before, during and after every operation of saving a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from fault_case import NOTHING, Case, Control, Outcome
from processes import Child, Countdown
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.files import Disk
from agent_r1.model.load import load_tokenizer
from agent_r1.store.manifest import check_manifest, checkpoint_step, list_checkpoints
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.trainer.protocol import TrainerState
from agent_r1.training.checkpoint_files import (
    Snapshot,
    TrainProgress,
    find_latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weights_on_cpu,
)
from agent_r1.training.monitor import MonitorState

DURING_WRITE = "during write"

CUTS = (0.0, 0.5, 1.0)
"""Shares of a file that are written when the process is killed; 1.0 stands for all but the last byte."""


class KilledDisk(Disk):
    """Reports each moment before and after an operation and in the middle of a write."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        self._reach = reach

    def make(self, folder: Path) -> None:
        self._around("make", lambda: super(KilledDisk, self).make(folder))

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        def file_by_file() -> None:
            put(place)
            files = [place] if place.is_file() else sorted(place.iterdir())
            whole = {file: file.read_bytes() for file in files}
            for file in files:
                file.unlink()
            for file, data in whole.items():
                for cut in CUTS:
                    file.write_bytes(data[: min(int(cut * len(data)), len(data) - 1)])
                    self._reach(DURING_WRITE)
                file.write_bytes(data)

        self._around("write", file_by_file)

    def sync(self, path: Path) -> None:
        self._around("fsync", lambda: super(KilledDisk, self).sync(path))

    def rename(self, old: Path, new: Path) -> None:
        self._around("rename", lambda: super(KilledDisk, self).rename(old, new))

    def remove(self, folder: Path) -> None:
        def file_by_file() -> None:
            for file in sorted(folder.iterdir()):
                file.unlink()
                self._reach("unlink")
            super(KilledDisk, self).remove(folder)

        self._around("remove", file_by_file)

    def _around(self, name: str, operation: Callable[[], None]) -> None:
        self._reach(name)
        operation()
        self._reach(name)


class InPlace(KilledDisk):
    """Writes into the folder of the checkpoint itself: the old content is lost before the new one is complete."""

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        super().write(place, put)
        copy_in_place(place)


def copy_in_place(place: Path) -> None:
    """Copy what was written over the existing checkpoint."""
    folder = place if place.is_dir() else place.parent
    shutil.copytree(folder, folder.with_name("step-2"), dirs_exist_ok=True)


NO_INTACT, OTHER_CONTENT = "no intact checkpoint", "does not contain what was saved"
"""Violations: the last good checkpoint is lost; a checkpoint has other content than was saved."""


class Saver:
    """Saves checkpoints of a small model that differ from step to step, and recognizes them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(TINY_BASE_FOLDER))
        self._model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(self._tokenizer), **sizes, **heads))

    def save(self, run: Path, step: int, disk: Disk, keep: int = 2) -> None:
        save_checkpoint(run, self._snapshot(step), self._model, self._tokenizer, keep, disk)

    def _snapshot(self, step: int) -> Snapshot:
        weights = {name: tensor + step for name, tensor in weights_on_cpu(self._model).items()}
        tensors = {name: tensor * step for name, tensor in weights.items()}
        trainer = TrainerState(tensors, {"step": step, "policy": f"checksum {step}"})
        return Snapshot(TrainProgress(step), weights, trainer, MonitorState(validation_warned=step))

    def violations(self, run: Path, at_least: int) -> list[str]:
        """Return what is wrong with the newest intact checkpoint of a run."""
        found = find_latest_checkpoint(run)
        if found.folder is None or checkpoint_step(found.folder) < at_least:
            return [f"{NO_INTACT} of step {at_least} or later"]
        saved, expected = (
            load_checkpoint(found.folder, self._model, self._tokenizer),
            self._snapshot(checkpoint_step(found.folder)),
        )
        same = (
            _equal(saved.trainer.tensors, expected.trainer.tensors)
            and saved.trainer.scalars == expected.trainer.scalars
        )
        return [*map(str, found.skipped), *([] if same else [f"{found.folder} {OTHER_CONTENT}"])]


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class SavedRun:
    """A run with checkpoints of steps 1 and 2, to which step 3 is saved repeatedly."""

    def __init__(self, place: Path) -> None:
        self._first, self.run, self._saver = place / "first", place / "run", Saver()
        for step in (1, 2):
            self._saver.save(self._first, step, Disk())

    def save(self, disk: Disk) -> None:
        """Save step 3."""
        self._saver.save(self.run, 3, disk)

    def reset(self) -> None:
        """Restore the checkpoints of steps 1 and 2, and remove all others."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self._first, self.run)

    def violations(self, killed: bool) -> list[str]:
        """Return what is wrong after the save of step 3, and after the save of the next step."""
        broken = self._saver.violations(self.run, 2 if killed else 3)
        try:
            self._saver.save(self.run, 4, Disk())
            for folder in list_checkpoints(self.run):
                check_manifest(folder)
        except AgentR1Error as error:
            broken.append(f"the next save: {error}")
        left = [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        return [*broken, *self._saver.violations(self.run, 4), *(f"{name} is left" for name in left)]


def kill_at_every_operation(disk: type[KilledDisk] = KilledDisk) -> Outcome:
    """Save step 3 after steps 1 and 2, killed at each moment in turn."""
    outcome, moments = NOTHING, list[str]()
    with tempfile.TemporaryDirectory() as place:
        saved = SavedRun(Path(place))
        saved.reset()
        saved.save(disk(moments.append))
        for number, moment in enumerate(moments, start=1):
            saved.reset()
            killed = Child(saved.save, disk(Countdown(number))).wait().killed
            broken = [*saved.violations(killed), *([] if killed else ["not killed"])]
            lines = tuple(f"killed at {number}, {moment}: {line}" for line in broken)
            outcome += Outcome(int(killed), lines, {moment: int(killed)})
    return outcome


MIN_MOMENTS = 80
"""Every save has at least this many moments."""

KILLED_SAVING = Case(
    "T2",
    "SIGKILL before and after every write, fsync, rename and removal of a save, and three times within each write",
    "the newest intact checkpoint is the old one or the new one, and contains what was saved; the next save works",
    lambda size: kill_at_every_operation(),
    MIN_MOMENTS,
    MIN_MOMENTS,
    (Control("saved in place", NO_INTACT, lambda size: kill_at_every_operation(InPlace), MIN_MOMENTS),),
)
