"""The files of a whole run: checkpoints that it can continue from, a final model, and a valid database."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preloaded import run_python

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import check_manifest, checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training import checkpoint_manager as manager
from agent_r1.training.checkpoint_files import CheckpointError, find_latest_checkpoint, load_checkpoint
from agent_r1.training.config import TrainConfig
from agent_r1.training.policy import load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

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


def test_training_can_continue_from_the_newest_checkpoint(taskset: TaskSet, run: Path) -> None:
    found = find_latest_checkpoint(run)
    assert found.folder is not None and checkpoint_step(found.folder) == 4 and found.skipped == ()
    config = config_of(taskset, run).model_copy(update={"model": str(found.folder)})
    policy = load_policy(config, taskset)
    saved = load_checkpoint(found.folder, policy.model, policy.tokenizer)
    algorithm = build_algorithm("grpo", {})
    trainer = SingleProcessTrainer(policy.model, algorithm, config.trainer, temperature=1.0)
    updater = PolicyUpdater(trainer, algorithm, config.trainer, reward_weights={}, seed=config.seed, steps=config.steps)
    updater.load_state(saved.trainer)
    with closing(RunReader(run)) as reader:
        last = list(reader.versions())[-1]
    continued = updater.publish().version
    assert (continued.number, continued.checksum) == (last.number, last.checksum) != (0, None)
    assert continued.step == 4 >= last.step  # the last step may have had nothing to train on


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


def test_no_checkpoints_are_saved_if_disabled(taskset: TaskSet, tmp_path: Path) -> None:
    folder = train(config_of(taskset, tmp_path / "run", steps=1, checkpoint_every=0), taskset, SilentProgress()).run
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "digest.json", "model", "run.db"]


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


FULL_DISK = """
import resource, signal, sys
from agent_r1.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_file_size_limit_stops_the_run_with_one_line(tmp_path: Path) -> None:
    arguments = ["train", "--run", str(tmp_path / "run"), "--quiet", "--checkpoint_every", "1"]
    small = [f"--{name}={value}" for name, value in {**SMALL, "steps": 1, "evaluate_n": 2}.items()][:-1]
    ended = run_python("-c", FULL_DISK, *arguments, *small)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "step-1 could not be written" in ended.stderr
    assert verify(tmp_path / "run").is_valid and list((tmp_path / "run" / "checkpoints").iterdir()) == []
