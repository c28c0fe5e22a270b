"""A run that stopped goes on as if it had never stopped, wherever that was."""

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from resuming import EVERYTHING, STEPS, Whole, config_of, made_by, resume, train_with_images

from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.store import RunReader, create_run, reopen_run
from agent_r1.store.manifest import list_checkpoints, checkpoint_step
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.progress import SilentProgress, StepReport


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resumed_from_any_step_a_run_is_as_if_it_had_never_stopped(
    algorithm: str, step: int, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm=algorithm)
    folder = run.stopped(step, tmp_path)
    assert verify(folder).is_valid
    assert resume(run.taskset, folder) == run.made
    report = verify(folder)
    assert report.violations == () and report.segments == 2 and report.attempts["pending"] == 0


@pytest.mark.parametrize("step", [4])
def test_the_groups_that_refilled_a_step_are_counted(step: int, whole: Callable[..., Whole], tmp_path: Path) -> None:
    refilling: dict[str, Any] = {"reward_weights.found": 0.0, "algorithm": {"max_refill_rounds": 2, "filters.zero_variance": 0.0}}
    run = whole(steps=6, **refilling)
    with closing(RunReader(run.place / "whole")) as reader:
        assert sum(measured.values["refilled_groups"] for measured in reader.metrics()) > 3
    assert resume(run.taskset, run.stopped(step, tmp_path)) == run.made


@pytest.mark.parametrize("step", [4])
def test_everything_that_a_run_knows_is_restored(step: int, whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(whimsical=True, **EVERYTHING)
    assert resume(run.taskset, run.stopped(step, tmp_path)) == run.made


def acknowledged(folder: Path) -> Counter[str]:
    """Every trajectory that is in a ledger, by its attempt, superseded or not."""
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        return Counter(
            name for (name,) in connection.execute("SELECT attempt FROM attempts JOIN outcomes ON id = attempt_id")
        )


@pytest.mark.parametrize("step", [3, 8])
def test_acting_ahead_nothing_acknowledged_is_lost_and_nothing_trained_twice(
    step: int, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(max_staleness=2)
    folder = run.stopped(step, tmp_path)
    before = acknowledged(folder)
    resume(run.taskset, folder)
    assert verify(folder).violations == () and not before - acknowledged(folder)
    with closing(RunReader(folder)) as reader:
        fates = Counter(fate.attempt.sort_key for fate in reader.fates())
        assert max(measured.values.get("staleness", 0) for measured in reader.metrics()) <= 2
    assert set(fates.values()) == {1} and len(fates) == STEPS * 2 * 4


def test_no_random_number_comes_from_what_all_share(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    """Python's, numpy's and torch's own generators belong to nobody; so there is none whose state is to be saved."""

    class Drawing(SilentProgress):
        def on_step(self, report: StepReport) -> None:
            random.random(), numpy.random.random(), torch.rand(1)

    run.train(config_of(micro, tmp_path / "run", {"algorithm": "ppo", "steps": 3}), micro, Drawing())
    assert made_by(tmp_path / "run") == whole(algorithm="ppo", steps=3).made


def events(folder: Path) -> list[str]:
    with closing(RunReader(folder)) as reader:
        return [f"{event.kind}: {event.detail}" for event in reader.events() if event.kind not in ("saved", "read")]


def test_killed_before_its_first_line_a_run_begins_anew(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="ppo", steps=3)
    with closing(RunReader(run.place / "whole")) as reader:
        create_run(tmp_path / "run", reader.config()).close()
    assert resume(micro, tmp_path / "run") == run.made
    assert events(tmp_path / "run")[0] == "resumed: from its beginning" and verify(tmp_path / "run").is_valid


def test_a_damaged_checkpoint_is_passed_over_and_said(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(8, tmp_path)
    with (folder / "checkpoints" / "step-8" / "learner.safetensors").open("r+b") as file:
        file.write(b"\0")
    assert resume(run.taskset, folder) == run.made
    damaged, resumed = events(folder)[:2]
    said = "step-8 holds a learner.safetensors that has changed; it is damaged-step-8 now"
    assert damaged.startswith("damaged: ") and damaged.endswith(said)
    assert (
        resumed == "resumed: from step 7" and verify(folder).is_valid and (folder / "checkpoints/damaged-step-8").is_dir()
    )


def test_a_best_that_is_damaged_is_forgotten_and_said(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(whimsical=True, **EVERYTHING)
    folder = run.stopped(5, tmp_path)
    oldest = min((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    (oldest / "model.safetensors").unlink()
    resume(run.taskset, folder)
    aside, lost = events(folder)[1:3]
    assert aside.endswith(f"lacks model.safetensors; it is damaged-{oldest.name} now")
    assert lost == f"damaged: the best by validation, of {oldest.name.replace('-', ' ')}, is lost"
    assert verify(folder).is_valid


def test_without_any_of_its_checkpoints_a_run_is_refused_and_keeps_what_it_has(
    whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(8, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    gone = (
        r"resume: got .*, which came to step 9 and has no whole checkpoint: that of step 8, which was saved, is gone; "
    )
    with pytest.raises(InvalidInput, match=gone + "put its checkpoints back, or begin a new run"):
        resume(run.taskset, folder)
    assert verify(folder).violations == ("newest checkpoint: that of step 8, which was saved, is gone",)
    assert verify(folder).segments == 1


def test_a_newest_checkpoint_that_is_gone_is_said(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(8, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-8")
    assert resume(run.taskset, folder) == run.made
    said = ["damaged: the checkpoint of step 8, which was saved, is gone", "resumed: from step 7"]
    assert events(folder)[:2] == said and verify(folder).is_valid


def test_a_checkpoint_of_another_run_is_not_taken(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run, other = whole(algorithm="grpo"), whole(algorithm="grpo", seed=1)
    folder, foreign = run.stopped(8, tmp_path), other.stopped(8, tmp_path / "other") / "checkpoints" / "step-8"
    shutil.rmtree(folder / "checkpoints" / "step-8")
    shutil.copytree(foreign, folder / "checkpoints" / "step-8")
    assert resume(run.taskset, folder) == run.made
    assert events(folder)[0].endswith("holds other weights than those of step 8; it is damaged-step-8 now")


def test_a_best_of_another_run_is_not_taken(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(whimsical=True, **EVERYTHING)
    folder = run.stopped(5, tmp_path)
    oldest, newest = sorted((folder / "checkpoints").iterdir(), key=checkpoint_step)[:: len(list_checkpoints(folder)) - 1]
    shutil.rmtree(oldest)
    shutil.copytree(newest, oldest)
    resume(run.taskset, folder)
    assert events(folder)[2].endswith("is lost") and verify(folder).is_valid


def test_a_complete_run_goes_on_with_more_steps_only(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="ppo", steps=3)
    folder = tmp_path / "run"
    train_with_images(micro, tmp_path, {"steps": 2, "algorithm": "ppo"})
    (tmp_path / "whole").rename(folder)
    with pytest.raises(InvalidInput, match="which is complete: it took its 2 steps; give more --steps"):
        resume(micro, folder)
    assert resume(micro, folder, steps=3) == run.made
    report = verify(folder)
    assert report.violations == () and report.segments == 2 and report.steps == 3


def test_a_run_that_was_moved_keeps_the_names_of_its_attempts(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(9, tmp_path)
    resume(run.taskset, folder)
    with closing(RunReader(folder)) as reader:
        assert {event.attempt.run for event in reader.attempts()} == {"whole"}
        assert reader.config()["run"] == str(folder)


def test_what_does_not_belong_to_the_run_is_refused_and_opens_no_lineage(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(5, tmp_path)
    with pytest.raises(InvalidInput, match="task: got 'other'; resume with the task that the run was started with"):
        resume(replace(micro, name="other"), folder)
    with closing(reopen_run(folder)), pytest.raises(InvalidInput, match="which another process is writing"):
        resume(micro, folder)
    with monkeypatch.context() as patch, pytest.raises(InvalidInput, match="model: got another than the run's"):
        patch.setattr("agent_r1.trainer.learner.digest", lambda model: "of other weights")
        resume(micro, folder)
    assert verify(folder).segments == 1
