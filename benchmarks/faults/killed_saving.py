"""T2: the process is killed before, amid and after every operation of saving a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from case import NOTHING, Case, Control, Outcome
from processes import Child, Countdown
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from agent_r1.core.errors import AgentR1Error
from agent_r1.model.load import load_tokenizer
from agent_r1.store.atomic_fs import Disk
from agent_r1.store.manifest import check_manifest, list_checkpoints, checkpoint_step
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.trainer.learner import LearnerState
from agent_r1.training.checkpoint.files import (
    TrainProgress,
    Snapshot,
    copy_weights,
    load_checkpoint,
    find_latest_checkpoint,
    save_checkpoint,
)
from agent_r1.training.monitor.state import MonitorState

AMID = "amid write"

CUTS = (0.0, 0.5, 1.0)
"""Shares of a file that are there when the process is killed amid its writing; of the last its last byte is not."""


class KilledDisk(Disk):
    """Names each moment before an operation, after it, and in the middle of a write: a file half there, others not."""

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
                    self._reach(AMID)
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
    """Writes into the folder of the checkpoint itself: what was there is lost before the new one is whole."""

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        super().write(place, put)
        copy_in_place(place)


def copy_in_place(place: Path) -> None:
    """Put what was written over the checkpoint that is there."""
    folder = place if place.is_dir() else place.parent
    shutil.copytree(folder, folder.with_name("step-2"), dirs_exist_ok=True)


NO_WHOLE, NOT_WHAT_WAS_SAVED = "no whole checkpoint", "does not hold what was saved"
"""What is said where the last good checkpoint is lost, and where one is another than it says."""


class Saver:
    """Saves checkpoints of a small model that differ from step to step, and knows them again."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(TINY_BASE_FOLDER))
        self._model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(self._tokenizer), **sizes, **heads))

    def save(self, run: Path, step: int, disk: Disk, keep: int = 2) -> None:
        save_checkpoint(run, self._snapshot(step), self._model, self._tokenizer, keep, disk)

    def _snapshot(self, step: int) -> Snapshot:
        weights = {name: tensor + step for name, tensor in copy_weights(self._model).items()}
        tensors = {name: tensor * step for name, tensor in weights.items()}
        learner = LearnerState(tensors, {"step": step, "policy": f"digest {step}"})
        return Snapshot(TrainProgress(step), weights, learner, MonitorState(groups=step))

    def broken(self, run: Path, at_least: int) -> list[str]:
        """What is wrong with the newest whole checkpoint of a run."""
        found = find_latest_checkpoint(run)
        if found.folder is None or checkpoint_step(found.folder) < at_least:
            return [f"{NO_WHOLE} of step {at_least} or later"]
        saved, wanted = (
            load_checkpoint(found.folder, self._model, self._tokenizer),
            self._snapshot(checkpoint_step(found.folder)),
        )
        same = _equal(saved.learner.tensors, wanted.learner.tensors) and saved.learner.scalars == wanted.learner.scalars
        return [*map(str, found.skipped), *([] if same else [f"{found.folder} {NOT_WHAT_WAS_SAVED}"])]


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Saved:
    """Checkpoints of steps 1 and 2, over which step 3 is to be saved, again and again."""

    def __init__(self, place: Path) -> None:
        self._first, self.run, self._saver = place / "first", place / "run", Saver()
        for step in (1, 2):
            self._saver.save(self._first, step, Disk())

    def save(self, disk: Disk) -> None:
        """Save step 3."""
        self._saver.save(self.run, 3, disk)

    def again(self) -> None:
        """Bring the checkpoints of steps 1 and 2 back, and no other."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self._first, self.run)

    def broken(self, killed: bool) -> list[str]:
        """What is wrong with what a save of step 3 left, and with what the save of the next step makes of it."""
        broken = self._saver.broken(self.run, 2 if killed else 3)
        try:
            self._saver.save(self.run, 4, Disk())
            for folder in list_checkpoints(self.run):
                check_manifest(folder)
        except AgentR1Error as error:
            broken.append(f"the next save: {error}")
        left = [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        return [*broken, *self._saver.broken(self.run, 4), *(f"{name} is left" for name in left)]


def at_every_operation(disk: type[KilledDisk] = KilledDisk) -> Outcome:
    """Save step 3 over steps 1 and 2, killed at each moment in turn."""
    outcome, moments = NOTHING, list[str]()
    with tempfile.TemporaryDirectory() as place:
        saved = Saved(Path(place))
        saved.again()
        saved.save(disk(moments.append))
        for number, moment in enumerate(moments, start=1):
            saved.again()
            killed = Child(saved.save, disk(Countdown(number))).wait().killed
            broken = [*saved.broken(killed), *([] if killed else ["not killed"])]
            lines = tuple(f"killed at {number}, {moment}: {line}" for line in broken)
            outcome += Outcome(int(killed), lines, {moment: int(killed)})
    return outcome


AT_LEAST = 80
"""So many moments has any save, however many files a model has."""

KILLED_SAVING = Case(
    "T2",
    "SIGKILL before and after every write, fsync, rename and removal of a save, and thrice amid each file's writing",
    "the newest whole checkpoint is the old one or the new one, and holds what was saved; the next save works",
    lambda size: at_every_operation(),
    AT_LEAST,
    AT_LEAST,
    (Control("saved in place", NO_WHOLE, lambda size: at_every_operation(InPlace), AT_LEAST),),
)
