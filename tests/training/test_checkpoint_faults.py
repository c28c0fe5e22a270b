"""Whatever happens while a checkpoint is saved, an intact one is on the disk and loads unchanged."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointing import Crash, FailingDisk, snapshot_of
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.store.manifest import check_manifest, checkpoint_step, list_checkpoints
from agent_r1.training.checkpoint_files import BestStep, CheckpointError, find_latest_checkpoint, save_checkpoint


@pytest.fixture
def begin(save: Callable[..., Path], tmp_path: Path) -> Callable[[], None]:
    save(1), save(2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "first")

    def again() -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.copytree(tmp_path / "first", tmp_path / "checkpoints")

    return again


def operations(save: Callable[..., Path], step: int) -> int:
    disk = FailingDisk(10**9, Crash(), False)
    save(step, disk=disk)
    return len(disk.done)


def test_after_a_crash_at_any_operation_the_newest_intact_checkpoint_is_loadable(
    begin: Callable[[], None], save: Callable[..., Path], holds: Callable[[Path], bool], tmp_path: Path
) -> None:
    begin()
    total = operations(save, 3)
    seen = set()
    for good in range(total):
        begin()
        disk = FailingDisk(good, Crash(), torn=bool(good % 3))
        with pytest.raises(Crash):
            save(3, disk=disk)
        newest = find_latest_checkpoint(tmp_path)
        assert newest.folder is not None and holds(newest.folder) and newest.skipped == ()
        seen.add((disk.done[-1], newest.folder.name))
        assert holds(save(3)) and [checkpoint_step(folder) for folder in list_checkpoints(tmp_path)] == [3, 2]
        assert all(not path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())
    assert total > 20 and {name for name, _ in seen} == {"make", "write", "sync", "rename", "remove"}
    assert {step for _, step in seen} == {"step-2", "step-3"}


def test_a_save_without_rename_is_detected_by_that_test(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InPlace(FailingDisk):
        def write(self, place: Path, put: Callable[[Path], None]) -> None:
            target = tmp_path / "checkpoints" / "step-2"
            super().write(target if place.is_dir() else target / place.name, put)

    save(1), save(2)
    with pytest.raises(Crash):
        save(3, disk=InPlace(2, Crash(), torn=True))
    assert find_latest_checkpoint(tmp_path).skipped != ()


FULL = OSError(28, "No space left on device")


def test_a_full_disk_at_any_operation_keeps_the_existing_checkpoints(
    begin: Callable[[], None], save: Callable[..., Path], holds: Callable[[Path], bool], tmp_path: Path
) -> None:
    begin()
    for good in range(0, operations(save, 3), 3):
        begin()
        disk = FailingDisk(good, FULL, torn=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(3, disk=disk)
        newest = find_latest_checkpoint(tmp_path).folder
        assert newest is not None and holds(newest)
        hidden = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
        assert checkpoint_step(newest) == 3 or not hidden
        assert holds(save(3))


def test_a_save_that_cannot_fit_is_not_started(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"step-2 could not be written: it takes 0 MB, and 0 MB are free"):
        save(2)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


@settings(max_examples=10, deadline=None)
@given(
    keep=st.integers(1, 3),
    saves=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans()), min_size=1, max_size=6),
)
def test_whatever_fails_the_last_good_checkpoint_is_never_lost(
    keep: int,
    saves: list[tuple[int, bool, bool]],
    tmp_path_factory: pytest.TempPathFactory,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    run = tmp_path_factory.mktemp("history")
    best, last_good = None, None
    for step, (good, crashes, is_best) in enumerate(saves, start=1):
        best = BestStep(step, 0.5) if is_best else best
        disk = FailingDisk(good, Crash() if crashes else FULL, torn=True)
        try:
            save_checkpoint(run, snapshot_of(step, model, best), model, tokenizer, keep, disk)
            last_good = step
        except (Crash, CheckpointError):
            best = None if best is not None and best.step == step else best
        newest = find_latest_checkpoint(run).folder
        found = None if newest is None else checkpoint_step(newest)
        assert found in ({last_good, step} if len(disk.done) > good else {step})
        last_good = found
        assert len(list_checkpoints(run)) <= keep + 2


STEPS_OF_A_SAVE = ("fsync", "rename", "rmdir", "unlink")


def killed_at(call: int, save: Callable[..., Path]) -> bool:
    """Save step 2 in a process that dies before its ``call``-th disk operation; False if it made fewer."""

    def dying(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **settings: object) -> object:
            nonlocal call
            call -= 1
            if call == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **settings)

        return counted

    child = os.fork()
    if child == 0:
        for name in STEPS_OF_A_SAVE:
            setattr(os, name, dying(getattr(os, name)))
        save(2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_after_a_kill_before_any_disk_operation_an_intact_checkpoint_exists(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    def save(step: int) -> Path:
        return save_checkpoint(tmp_path, snapshot_of(step, model), model, tokenizer, keep=1)

    seen = set()
    for call in itertools.count(1):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        save(1)
        died = killed_at(call, save)
        left = list_checkpoints(tmp_path)
        assert left and all(check_manifest(folder) for folder in left)
        seen.add(tuple(folder.name for folder in left))
        assert save(3).name == "step-3"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
        if not died:
            break
    assert call > 10 and seen == {("step-1",), ("step-2", "step-1"), ("step-2",)}
