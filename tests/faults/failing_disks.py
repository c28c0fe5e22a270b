"""T3, T4 and T5a: disks that fail, files that changed, and histories of failing saves."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from fault_case import Case, Control, Outcome, Size
from killed_saving import NO_INTACT, OTHER_CONTENT, Saver
from killed_training import OTHER_RESULT
from micro_run import find_violations, result_of, run_reference, train_or_resume
from processes import Child
from scenarios import PPO, Scenario

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import Disk
from agent_r1.store import manifest
from agent_r1.store.manifest import CHECKPOINTS, checkpoint_step, list_checkpoints
from agent_r1.training.checkpoint_files import CheckpointError, find_latest_checkpoint
from agent_r1.training.progress import SilentProgress

REFUSALS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EROFS)


class Died(BaseException):
    """The process died: nothing is executed after it."""


class FailingDisk(Disk):
    """Raises ``error`` after ``good`` operations; a failing write leaves half of its data."""

    def __init__(self, good: int, error: BaseException) -> None:
        self._good, self._error = good, error
        self.fired = False

    def make(self, folder: Path) -> None:
        self._unless_failing(lambda: Disk.make(self, folder))

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        self._unless_failing(lambda: put(place), lambda: _torn(place, put))

    def sync(self, path: Path) -> None:
        self._unless_failing(lambda: Disk.sync(self, path))

    def rename(self, old: Path, new: Path) -> None:
        self._unless_failing(lambda: Disk.rename(self, old, new))

    def remove(self, folder: Path) -> None:
        self._unless_failing(lambda: Disk.remove(self, folder))

    def _unless_failing(self, operation: Callable[[], None], half: Callable[[], None] = lambda: None) -> None:
        if self.fired and isinstance(self._error, Died):
            return
        self._good -= 1
        if self._good >= 0 or self.fired:
            return operation()
        self.fired = True
        half()
        raise self._error


class RemoveFirst(FailingDisk):
    """Removes the existing checkpoints before it starts another."""

    def make(self, folder: Path) -> None:
        for old in folder.parent.glob("step-*"):
            shutil.rmtree(old)
        super().make(folder)


def _torn(place: Path, put: Callable[[Path], None]) -> None:
    put(place)
    for file in [place] if place.is_file() else place.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def fail_anywhere(size: Size, disk: type[FailingDisk] = FailingDisk) -> Outcome:
    """Save step 3 after steps 1 and 2; each operation in turn fails with each error."""
    saver, outcome = Saver(), Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        first, run = Path(place) / "first", Path(place) / "run"
        saver.save(first, 1, Disk())
        saver.save(first, 2, Disk())
        for good, number in ((good, number) for good in itertools.count() for number in REFUSALS):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(first, run)
            failing = disk(good, OSError(number, os.strerror(number)))
            broken = list(_check_failed_save(saver, run, failing))
            outcome += Outcome(int(failing.fired), tuple(f"operation {good}, {number}: {line}" for line in broken))
            if not failing.fired:
                return outcome
    raise AssertionError("a save has an end")


def _check_failed_save(saver: Saver, run: Path, failing: FailingDisk) -> Iterator[str]:
    raised = False
    try:
        saver.save(run, 3, failing)
    except CheckpointError:
        raised = True
    yield from saver.violations(run, 2 if failing.fired else 3)
    if raised != failing.fired:
        yield "no error was raised"
    saver.save(run, 4, Disk())
    yield from saver.violations(run, 4)
    yield from (f"{path.name} is left" for path in (run / CHECKPOINTS).glob(".*"))


LIMITS = (60_000, 1_400_000)
"""File size limits in bytes, from too small for any run to too small for the largest file only."""


def limit_file_size(size: Size, again: Scenario = PPO) -> Outcome:
    """Train with a file size limit that the kernel enforces, then resume without it."""
    low, high = LIMITS
    outcome = Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        expected, _ = run_reference(Path(place) / "whole", PPO)
        for number in range(size.injections):
            limit = low + (high - low) * number // max(1, size.injections - 1)
            folder = Path(place) / f"run-{number}"
            ended = Child(_limited, limit, folder).wait()
            broken = find_violations(folder, Path(place) / "no log") if folder.exists() else []
            broken += [] if _is_clear(ended.error) else [f"no clear error, but {ended.error}"]
            if again != PPO:
                shutil.rmtree(folder, ignore_errors=True)
            Child(train_or_resume, folder, again, SilentProgress()).wait()
            broken += [] if result_of(folder) == expected else [OTHER_RESULT]
            outcome += Outcome(int(ended.error is not None), tuple(f"limit {limit}: {line}" for line in broken))
    return outcome


def _limited(limit: int, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    train_or_resume(folder, PPO, SilentProgress())


def _is_clear(error: str | None) -> bool:
    return error is not None and error.startswith(("InvalidInput", "RunWriteError", "CheckpointError"))


FLIPS = 64
"""Number of bits flipped per file."""


def change_files(size: Size, checked: bool = True) -> Outcome:
    """Flip bits of the files of a checkpoint, truncate them, extend them, swap them with those of another.

    The older checkpoint must be used, unless the changed one still contains exactly what was saved (for example, if
    only white space in its manifest changed).
    """
    saver, outcome = Saver(), Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        run = Path(place)
        saver.save(run, 2, Disk())
        saver.save(run, 3, Disk())
        newest = run / CHECKPOINTS / "step-3"
        for file in sorted(newest.iterdir()):
            whole = file.read_bytes()
            for change in _changes(whole, (run / CHECKPOINTS / "step-2" / file.name).read_bytes(), size):
                file.write_bytes(change)
                outcome += Outcome(1, tuple(f"{file.name}: {line}" for line in _check_changed(saver, run, checked)))
            file.write_bytes(whole)
    return outcome


def _changes(whole: bytes, other: bytes, size: Size) -> Iterator[bytes]:
    flips = min(FLIPS, size.injections // 4)
    for number in range(flips):
        changed = bytearray(whole)
        changed[len(whole) * number // flips] ^= 1 << number % 8
        yield bytes(changed)
    yield from (b"", whole[: len(whole) // 2], whole + b"\0")
    if other != whole:
        yield other


def _check_changed(saver: Saver, run: Path, checked: bool) -> list[str]:
    unhashed = patch.object(manifest, "_hash_entry", lambda path: manifest.FileEntry(path.stat().st_size, ""))
    compared = patch.object(manifest.FileEntry, "__eq__", lambda one, other: one.size == other.size)
    if not checked:
        with unhashed, compared:
            return _check_latest(saver, run)
    return _check_latest(saver, run)


def _check_latest(saver: Saver, run: Path) -> list[str]:
    try:
        found = find_latest_checkpoint(run)
        return [] if found.folder is not None and found.skipped else saver.violations(run, 2)
    except InvalidInput:
        return []  # the change turned it into another format
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def save_histories(size: Size, disk: type[FailingDisk] = FailingDisk) -> Outcome:
    """Histories of six saves, keeping one to three; some crash and some fail."""
    saver, outcome = Saver(), Outcome(0, ())
    for number in itertools.count(size.seed):
        if outcome.fired >= size.injections:
            return outcome
        with tempfile.TemporaryDirectory() as place:
            outcome += _run_history(saver, Path(place), random.Random(number), disk)
    raise AssertionError("counting has no end")


def _run_history(saver: Saver, run: Path, drawn: random.Random, disk: type[FailingDisk]) -> Outcome:
    keep, good, fired, broken = drawn.randint(1, 3), 0, 0, list[str]()
    for step in range(1, 7):
        error = drawn.choice([Died(), OSError(errno.ENOSPC, "No space left on device")])
        failing, most = disk(drawn.randint(0, 60), error), len(list_checkpoints(run)) + 1
        try:
            saver.save(run, step, failing, keep)
            good, most = step, keep
        except (Died, CheckpointError):
            fired += 1
        if good:
            broken += saver.violations(run, good)
        newest = find_latest_checkpoint(run).folder
        good = good if newest is None else checkpoint_step(newest)
        if len(list_checkpoints(run)) > most:
            broken.append(f"{len(list_checkpoints(run))} checkpoints exist, at most {most} are allowed")
    return Outcome(fired, tuple(broken))


DISKS: tuple[Case, ...] = (
    Case(
        "T3a",
        "ENOSPC, EIO, EFBIG, EROFS at each operation of a save",
        "an error is raised; the previous checkpoint is intact; the next save works",
        fail_anywhere,
        90,
        90,
        (Control("older ones are removed first", NO_INTACT, lambda size: fail_anywhere(size, RemoveFirst), 1),),
    ),
    Case(
        "T3b",
        "a limit on the size of files, from 60 kB to 1.4 MB",
        "ends with one line; resumed without the limit: the same digest and weights",
        limit_file_size,
        12,
        2,
        (
            Control(
                "started again with another seed", OTHER_RESULT, lambda size: limit_file_size(size, PPO.but(seed=1)), 1
            ),
        ),
    ),
    Case(
        "T4",
        "files of a checkpoint: bits flipped, truncated, extended, swapped",
        "skipped with a reason, and the previous one is used; or it loads exactly as saved",
        change_files,
        600,
        40,
        (
            Control(
                "sizes are compared instead of hashes",
                OTHER_CONTENT,
                lambda size: change_files(size, checked=False),
                40,
            ),
        ),
    ),
    Case(
        "T5a",
        "histories of saves that crash or fail, keeping 1 to 3",
        "the last good checkpoint exists; at most the kept number after a save, one more after a failure",
        save_histories,
        2000,
        20,
        (Control("older ones are removed first", NO_INTACT, lambda size: save_histories(size, RemoveFirst), 20),),
    ),
)
