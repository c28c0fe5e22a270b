"""T2: the process is killed at every operation of saving a checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from case import Case, Control, Outcome
from processes import Child, Countdown
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from agent_r1.core.errors import AgentR1Error
from agent_r1.learn.learner import LearnerState
from agent_r1.model.load import load_tokenizer
from agent_r1.store.disk import Disk
from agent_r1.store.manifest import check_whole, checkpoints, step_of
from agent_r1.tasks.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.train.checkpoint import Position, Snapshot, copied, load_checkpoint, newest_whole, save_checkpoint
from agent_r1.train.doctor.state import DoctorState

Saving = Callable[[Path, int, Disk], None]


class KilledDisk(Disk):
    """Counts down before each operation, in the middle of each write, and after each."""

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown

    def make(self, folder: Path) -> None:
        self._around(lambda: super(KilledDisk, self).make(folder))

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        def torn() -> None:
            put(place)
            files = [place] if place.is_file() else sorted(place.iterdir())
            whole = {file: file.read_bytes() for file in files}
            for file, data in whole.items():
                os.truncate(file, len(data) // 2)
            self._countdown()
            for file, data in whole.items():
                file.write_bytes(data)

        self._around(torn)

    def sync(self, path: Path) -> None:
        self._around(lambda: super(KilledDisk, self).sync(path))

    def rename(self, old: Path, new: Path) -> None:
        self._around(lambda: super(KilledDisk, self).rename(old, new))

    def remove(self, folder: Path) -> None:
        def file_by_file() -> None:
            for file in sorted(folder.iterdir()):
                file.unlink()
                self._countdown()
            super(KilledDisk, self).remove(folder)

        self._around(file_by_file)

    def _around(self, operation: Callable[[], None]) -> None:
        self._countdown()
        operation()
        self._countdown()


class InPlace(KilledDisk):
    """Writes into the folder of the checkpoint itself: what was there is lost before the new one is whole."""

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        super().write(place, put)
        folder = place if place.is_dir() else place.parent
        shutil.copytree(folder, folder.with_name("step-2"), dirs_exist_ok=True)


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
        weights = {name: tensor + step for name, tensor in copied(self._model).items()}
        tensors = {name: tensor * step for name, tensor in weights.items()}
        learner = LearnerState(tensors, {"step": step, "policy": f"digest {step}"})
        return Snapshot(Position(step), weights, learner, DoctorState(groups=step))

    def broken(self, run: Path, at_least: int) -> list[str]:
        """What is wrong with the newest whole checkpoint of a run."""
        found = newest_whole(run)
        if found.folder is None or step_of(found.folder) < at_least:
            return [f"no whole checkpoint of step {at_least} or later"]
        saved, wanted = (
            load_checkpoint(found.folder, self._model, self._tokenizer),
            self._snapshot(step_of(found.folder)),
        )
        same = _equal(saved.learner.tensors, wanted.learner.tensors) and saved.learner.scalars == wanted.learner.scalars
        return [*found.skipped, *([] if same else [f"{found.folder} does not hold what was saved"])]


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def at_every_operation(disk: type[KilledDisk] = KilledDisk) -> Outcome:
    """Save step 3 over steps 1 and 2, killed at each position in turn."""
    saver, outcome = Saver(), Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        first = Path(place) / "first"
        for step in (1, 2):
            saver.save(first, step, Disk())
        for position in itertools.count(1):
            killed, broken = _killed(saver, first, Path(place) / "run", position, disk)
            outcome += Outcome(int(killed), tuple(f"killed at {position}: {line}" for line in broken))
            if not killed:
                return outcome
    raise AssertionError("a save has an end")


AT_LEAST = 50
"""So many positions has any save, however many files a model has."""


def _killed(saver: Saver, first: Path, run: Path, position: int, disk: type[KilledDisk]) -> tuple[bool, list[str]]:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(first, run)
    killed = Child(saver.save, run, 3, disk(Countdown(position))).wait().killed
    broken = saver.broken(run, 2 if killed else 3)
    try:
        saver.save(run, 4, Disk())
        for folder in checkpoints(run):
            check_whole(folder)
    except AgentR1Error as error:
        broken.append(f"the next save: {error}")
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    return killed, [*broken, *saver.broken(run, 4), *(f"{name} is left" for name in left)]


KILLED_SAVING = Case(
    "T2",
    "SIGKILL before, amid and after every write, fsync, rename and removal of a save",
    "the newest whole checkpoint is the old one or the new one, and holds what was saved; the next save works",
    lambda size: at_every_operation(),
    AT_LEAST,
    AT_LEAST,
    (Control("saved in place", lambda size: at_every_operation(InPlace), AT_LEAST),),
)
