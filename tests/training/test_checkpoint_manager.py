"""The files of a whole run: checkpoints that it can continue from, a final model, and a valid database."""

import json
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import check_manifest, checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport
from agent_r1.training import build as build_run, checkpoint_manager as manager
from agent_r1.training.checkpoint_files import CheckpointError, Snapshot, find_latest_checkpoint, saved_tensors
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import resume, train
from agent_r1.training.tables import make_cell

SMALL = {"steps": 4, "groups_per_step": 4, "group_size": 4, "evaluate_n": 4, "pass_k": 0, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))


def config_of(taskset: TaskSet, folder: Path, **changes: Any) -> TrainConfig:
    layers = [Layer("test", {**SMALL, "run": str(folder), **changes}), Layer("recipe", taskset.recipe)]
    return resolve(TrainConfig, layers)


@pytest.fixture(scope="module")
def run(taskset: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config_of(taskset, tmp_path_factory.mktemp("kept") / "run"), taskset, SilentProgress()).run


def test_a_run_is_valid(run: Path) -> None:
    report = verify(run)
    assert report.violations == () and report.steps == 4 and report.checkpoints >= 2
    assert Counter(report.attempts).total() == 4 * 4 * 4 and report.attempts["pending"] == 0


def test_the_database_has_the_checksum_of_every_version(run: Path) -> None:
    with closing(RunReader(run)) as reader:
        versions = list(reader.versions())
    assert [version.number for version in versions] == list(range(len(versions))) and versions[0].step == 0
    assert len({version.checksum for version in versions}) == len(versions) > 2
    assert check_manifest(run / "model").fingerprint.weights in {version.checksum for version in versions}


def test_only_timings_are_not_reproducible(run: Path) -> None:
    with closing(RunReader(run)) as reader:
        metrics, everything = list(reader.reproducible_metrics()), list(reader.metrics())
    for one, more in zip(metrics, everything, strict=True):
        measured = {name for name in more.values if "second" in name or name.startswith("engine/")}
        assert measured == more.values.keys() - one.values.keys()
        assert {"reward", "em"} <= one.values.keys()


def test_the_best_by_validation_is_among_the_checkpoints(taskset: TaskSet, run: Path) -> None:
    folder = find_latest_checkpoint(run).folder
    assert folder is not None
    best = json.loads((folder / "progress.json").read_text("utf-8"))["best"]
    with closing(RunReader(run)) as reader:
        validated = {m.step: m.values["validation_em"] for m in reader.metrics() if "validation_em" in m.values}
    assert best["em"] == max(validated.values()) == validated[best["step"]]
    assert best["step"] in [checkpoint_step(path) for path in list_checkpoints(run)]
    kept = check_manifest(run / "checkpoints" / f"step-{best['step']}").fingerprint
    assert kept.weights == check_manifest(run / "model").fingerprint.weights


def test_without_memory_for_copies_training_waits_and_writes_the_same_checkpoints(
    taskset: TaskSet, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, saves, saving, updating = build_run.plan_memory, [], threading.Event(), threading.Event()
    monkeypatch.setattr(build_run, "plan_memory", lambda *given: replace(plan(*given), copies=False))
    update, save = PolicyUpdater.update, manager.save_checkpoint

    async def watched(self: PolicyUpdater, batch: Any) -> UpdateReport:
        if saving.is_set():
            updating.set()
        return await update(self, batch)

    def slow(folder: Path, snapshot: Snapshot, model: Any, *rest: Any, **options: Any) -> Path:
        own = {parameter.data_ptr() for parameter in model.parameters()}
        saving.set()
        updating.wait(timeout=2.0)  # time for an update that does not wait
        saving.clear()
        written = save(folder, snapshot, model, *rest, **options)
        saves.append({weight.data_ptr() for weight in snapshot.weights.values()} <= own)
        return written

    monkeypatch.setattr(PolicyUpdater, "update", watched)
    monkeypatch.setattr(manager, "save_checkpoint", slow)
    waiting = train(config_of(taskset, tmp_path / "run"), taskset, SilentProgress()).run
    assert len(saves) >= 2 and all(saves)  # without a copy
    assert not updating.is_set()
    folders = [sorted(list_checkpoints(folder)) for folder in (run, waiting)]
    assert [path.name for path in folders[0]] == [path.name for path in folders[1]]
    for one, other in zip(*folders, strict=True):
        assert check_manifest(one).fingerprint == check_manifest(other).fingerprint
        pairs = saved_tensors(one), saved_tensors(other)
        assert pairs[0].keys() == pairs[1].keys() and all(map(torch.equal, *(pair.values() for pair in pairs)))
    assert check_manifest(run / "model").fingerprint == check_manifest(waiting / "model").fingerprint
    with closing(RunReader(waiting)) as reader:
        assert any("training waits while a checkpoint is written" in event.detail for event in reader.events())


def test_a_failed_save_stops_the_run_with_one_line_and_the_model_is_still_saved(
    taskset: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *_: object, **__: object) -> None:
        raise CheckpointError("step-1 could not be written: No space left on device")

    monkeypatch.setattr(manager, "save_checkpoint", full)
    config = config_of(taskset, tmp_path / "run", steps=1, checkpoint_every=1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(config, taskset, SilentProgress())
    assert check_manifest(tmp_path / "run" / "model")
    with closing(RunReader(tmp_path / "run")) as reader:
        *_, event = reader.events()
    assert event.kind == "stopped" and "No space left" in event.detail and verify(tmp_path / "run").is_valid


def test_a_best_checkpoint_that_is_gone_at_the_end_is_one_line_and_the_run_can_be_resumed(
    taskset: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling, finalize = iter((0.9, 0.1, 0.05)), manager.CheckpointManager.finalize

    async def lose_best_first(self: manager.CheckpointManager) -> None:
        await self.wait()
        assert self.best is not None and self.best.step == 1
        rmtree(tmp_path / "run" / "checkpoints" / "step-1")
        await finalize(self)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "make_cell", lambda results: replace(make_cell(results), em=next(falling)))
        patch.setattr(manager.CheckpointManager, "finalize", lose_best_first)
        config = config_of(taskset, tmp_path / "run", steps=2, evaluate_every=1, checkpoint_every=1)
        with pytest.raises(CheckpointError, match=r"weights of step 1, the best by validation, are lost: .*; resume"):
            train(config, taskset, SilentProgress())
    resumed = resume(config, taskset, SilentProgress()).run
    saved = check_manifest(resumed / "checkpoints" / "step-2").fingerprint
    assert check_manifest(resumed / "model").fingerprint.weights == saved.weights
