"""T3, T4 and T5a: disks that refuse, files that changed, and histories of saves that fail."""

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

from case import Case, Control, Outcome, Size
from killed_saving import NO_WHOLE, NOT_WHAT_WAS_SAVED, Saver
from killed_training import OTHERWISE
from micro import found_broken, go, made_by, reference
from processes import Child
from scenarios import PPO, Scenario

from agent_r1.core.errors import InvalidInput
from agent_r1.store import manifest
from agent_r1.store.atomic_fs import Disk
from agent_r1.store.manifest import CHECKPOINTS, list_checkpoints, checkpoint_step
from agent_r1.training.checkpoint.files import CheckpointError, find_latest_checkpoint
from agent_r1.training.progress import SilentProgress

REFUSALS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EROFS)


class Died(BaseException):
    """The process is gone: nothing is done after it."""


class Refusing(Disk):
    """Does ``good`` operations; the next leaves half of what it was to write, and raises ``error``."""

    def __init__(self, good: int, error: BaseException) -> None:
        self._good, self._error = good, error
        self.fired = False

    def make(self, folder: Path) -> None:
        self._unless_refused(lambda: Disk.make(self, folder))

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        self._unless_refused(lambda: put(place), lambda: _torn(place, put))

    def sync(self, path: Path) -> None:
        self._unless_refused(lambda: Disk.sync(self, path))

    def rename(self, old: Path, new: Path) -> None:
        self._unless_refused(lambda: Disk.rename(self, old, new))

    def remove(self, folder: Path) -> None:
        self._unless_refused(lambda: Disk.remove(self, folder))

    def _unless_refused(self, operation: Callable[[], None], half: Callable[[], None] = lambda: None) -> None:
        if self.fired and isinstance(self._error, Died):
            return
        self._good -= 1
        if self._good >= 0 or self.fired:
            return operation()
        self.fired = True
        half()
        raise self._error


class Eager(Refusing):
    """Removes the checkpoints that are there before it begins another."""

    def make(self, folder: Path) -> None:
        for old in folder.parent.glob("step-*"):
            shutil.rmtree(old)
        super().make(folder)


def _torn(place: Path, put: Callable[[Path], None]) -> None:
    put(place)
    for file in [place] if place.is_file() else place.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def refused_anywhere(size: Size, disk: type[Refusing] = Refusing) -> Outcome:
    """Save step 3 over steps 1 and 2, where each operation in turn is refused for each reason."""
    saver, outcome = Saver(), Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        first, run = Path(place) / "first", Path(place) / "run"
        saver.save(first, 1, Disk())
        saver.save(first, 2, Disk())
        for good, number in ((good, number) for good in itertools.count() for number in REFUSALS):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(first, run)
            failing = disk(good, OSError(number, os.strerror(number)))
            broken = list(_refused(saver, run, failing))
            outcome += Outcome(int(failing.fired), tuple(f"operation {good}, {number}: {line}" for line in broken))
            if not failing.fired:
                return outcome
    raise AssertionError("a save has an end")


def _refused(saver: Saver, run: Path, failing: Refusing) -> Iterator[str]:
    told = False
    try:
        saver.save(run, 3, failing)
    except CheckpointError:
        told = True
    yield from saver.broken(run, 2 if failing.fired else 3)
    if told != failing.fired:
        yield "nobody was told"
    saver.save(run, 4, Disk())
    yield from saver.broken(run, 4)
    yield from (f"{path.name} is left" for path in (run / CHECKPOINTS).glob(".*"))


LIMITS = (60_000, 1_400_000)
"""Bytes that files of a run may have at most: no run at all, and all but the largest file, fit in these."""


def files_that_cannot_grow(size: Size, again: Scenario = PPO) -> Outcome:
    """Runs whose files may grow to a limit, which the kernel sets, and that go on without it."""
    low, high = LIMITS
    outcome = Outcome(0, ())
    with tempfile.TemporaryDirectory() as place:
        made, _ = reference(Path(place) / "whole", PPO)
        for number in range(size.injections):
            limit = low + (high - low) * number // max(1, size.injections - 1)
            folder = Path(place) / f"run-{number}"
            ended = Child(_limited, limit, folder).wait()
            broken = found_broken(folder, Path(place) / "no log") if folder.exists() else []
            broken += [] if _clear(ended.error) else [f"not told, but {ended.error}"]
            if again != PPO:
                shutil.rmtree(folder, ignore_errors=True)
            Child(go, folder, again, SilentProgress()).wait()
            broken += [] if made_by(folder) == made else [OTHERWISE]
            outcome += Outcome(int(ended.error is not None), tuple(f"limit {limit}: {line}" for line in broken))
    return outcome


def _limited(limit: int, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    go(folder, PPO, SilentProgress())


def _clear(error: str | None) -> bool:
    return error is not None and error.startswith(("InvalidInput", "LedgerError", "CheckpointError"))


FLIPS = 64
"""Bits per file that are flipped."""


def changed_files(size: Size, checked: bool = True) -> Outcome:
    """Flip bits of the files of a checkpoint, cut them, swap them with those of another, remove them.

    The older checkpoint has to serve, unless the changed one still holds exactly what was saved (its manifest's own
    spaces, say).
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
                outcome += Outcome(1, tuple(f"{file.name}: {line}" for line in _changed(saver, run, checked)))
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


def _changed(saver: Saver, run: Path, checked: bool) -> list[str]:
    unhashed = patch.object(manifest, "_entry", lambda path: manifest.FileEntry(path.stat().st_size, ""))
    compared = patch.object(manifest.FileEntry, "__eq__", lambda one, other: one.size == other.size)
    if not checked:
        with unhashed, compared:
            return _held(saver, run)
    return _held(saver, run)


def _held(saver: Saver, run: Path) -> list[str]:
    try:
        found = find_latest_checkpoint(run)
        return [] if found.folder is not None and found.skipped else saver.broken(run, 2)
    except InvalidInput:
        return []  # a newer format, as its manifest now says
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def histories(size: Size, disk: type[Refusing] = Refusing) -> Outcome:
    """Histories of six saves of which some crash and some are refused, keeping one to three."""
    saver, outcome = Saver(), Outcome(0, ())
    for number in itertools.count(size.seed):
        if outcome.fired >= size.injections:
            return outcome
        with tempfile.TemporaryDirectory() as place:
            outcome += _lived(saver, Path(place), random.Random(number), disk)
    raise AssertionError("counting has no end")


def _lived(saver: Saver, run: Path, drawn: random.Random, disk: type[Refusing]) -> Outcome:
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
            broken += saver.broken(run, good)
        newest = find_latest_checkpoint(run).folder
        good = good if newest is None else checkpoint_step(newest)
        if len(list_checkpoints(run)) > most:
            broken.append(f"{len(list_checkpoints(run))} checkpoints are there, where {most} are the most")
    return Outcome(fired, tuple(broken))


DISKS: tuple[Case, ...] = (
    Case(
        "T3a",
        "ENOSPC, EIO, EFBIG, EROFS at each operation of a save",
        "said; the checkpoint before is whole; the next save works",
        refused_anywhere,
        90,
        90,
        (Control("older ones removed first", NO_WHOLE, lambda size: refused_anywhere(size, Eager), 1),),
    ),
    Case(
        "T3b",
        "files of a run may grow to a limit only, from 60 kB to 1.4 MB",
        "ends in one line; goes on without the limit to the same digest and weights",
        files_that_cannot_grow,
        12,
        2,
        (
            Control(
                "begun anew by another seed", OTHERWISE, lambda size: files_that_cannot_grow(size, PPO.but(seed=1)), 1
            ),
        ),
    ),
    Case(
        "T4",
        "files of a checkpoint: bits flipped, cut, grown, swapped",
        "passed over with the reason, the one before serves; or what is read is what was saved",
        changed_files,
        600,
        40,
        (
            Control(
                "sizes compared, not hashes", NOT_WHAT_WAS_SAVED, lambda size: changed_files(size, checked=False), 40
            ),
        ),
    ),
    Case(
        "T5a",
        "histories of saves that crash or are refused, keeping 1 to 3",
        "the last good checkpoint is there; no more than are kept after a save, one more after one that failed",
        histories,
        2000,
        20,
        (Control("older ones removed first", NO_WHOLE, lambda size: histories(size, Eager), 20),),
    ),
)
