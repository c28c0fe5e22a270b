"""A resumed run gives the results of an uninterrupted one, wherever it stopped."""

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from resuming import EVERYTHING, STEPS, Whole, config_of, result_of, resume, train_with_images

from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.progress import SilentProgress, StepReport
from agent_r1.training.resume import DECODE_STEP
from agent_r1.training.run import UPDATE


@pytest.mark.parametrize(("algorithm", "step"), [("grpo", STEPS // 2), ("ppo", 0), ("ppo", 2), ("ppo", STEPS - 1)])
def test_a_run_resumed_from_any_step_equals_an_uninterrupted_one(
    algorithm: str, step: int, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm=algorithm)
    folder = run.stopped(step, tmp_path)
    assert verify(folder).is_valid
    assert resume(run.taskset, folder) == run.result
    report = verify(folder)
    assert report.violations == () and report.segments == 2 and report.attempts["pending"] == 0
    assert recorded_tokens(folder) == recorded_tokens(run.place / "whole")


def recorded_tokens(folder: Path) -> list[str]:
    """Return the token records of all attempts as text, because a NaN does not equal itself."""
    with closing(RunReader(folder)) as reader:
        records = [record for event in reader.attempts() for record in reader.token_records(event.attempt)]
    assert records
    return sorted(repr(replace(record, attempt=replace(record.attempt, run=""))) for record in records)


def acknowledged(folder: Path) -> Counter[str]:
    """Return the attempts of all recorded trajectories, superseded or not."""
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        return Counter(
            name
            for (name,) in connection.execute("SELECT attempt FROM attempts JOIN outcomes ON attempts.id = attempt_id")
        )


def test_with_stale_rollouts_nothing_recorded_is_lost_and_nothing_is_trained_twice(
    whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(max_staleness=2)
    folder = run.stopped(4, tmp_path)
    before = acknowledged(folder)
    resume(run.taskset, folder)
    assert verify(folder).violations == () and not before - acknowledged(folder)
    with closing(RunReader(folder)) as reader:
        fates = Counter(fate.attempt.sort_key for fate in reader.fates())
        assert max(metrics.values.get("staleness", 0) for metrics in reader.metrics()) <= 2
    assert set(fates.values()) == {1} and len(fates) == STEPS * 2 * 4


def test_no_random_number_comes_from_a_global_generator(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    class Drawing(SilentProgress):
        def on_step(self, report: StepReport) -> None:
            random.random(), numpy.random.random(), torch.rand(1)

    run.train(config_of(micro, tmp_path / "run", {"algorithm": "ppo", "steps": 3}), micro, Drawing())
    assert result_of(tmp_path / "run") == whole(algorithm="ppo", steps=3).result


def events(folder: Path) -> list[str]:
    with closing(RunReader(folder)) as reader:
        return [
            f"{event.kind}: {event.detail}"
            for event in reader.events()
            if event.kind not in ("checkpoint_saved", "fingerprint", "tools", "hardware", "validation", "table")
            and event.kind not in (DECODE_STEP, UPDATE)
        ]


def test_a_run_killed_before_its_first_event_starts_from_the_beginning(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="ppo", steps=3)
    with closing(RunReader(run.place / "whole")) as reader:
        create_run(tmp_path / "run", reader.config()).close()
    assert resume(micro, tmp_path / "run") == run.result
    assert events(tmp_path / "run")[0] == "resumed: from its beginning" and verify(tmp_path / "run").is_valid


def test_a_corrupt_checkpoint_is_skipped_and_reported(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(4, tmp_path)
    with (folder / "checkpoints" / "step-4" / "trainer.safetensors").open("r+b") as file:
        file.write(b"\0")
    assert resume(run.taskset, folder) == run.result
    corrupt, resumed = events(folder)[:2]
    reason = "step-4 holds a trainer.safetensors that has changed; it was renamed to corrupt-step-4"
    assert corrupt.startswith("corrupt: ") and corrupt.endswith(reason)
    assert (
        resumed == "resumed: from step 3"
        and verify(folder).is_valid
        and (folder / "checkpoints/corrupt-step-4").is_dir()
    )


def test_a_corrupt_best_checkpoint_is_dropped_and_reported(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(unpredictable=True, **EVERYTHING)
    folder = run.stopped(5, tmp_path)
    oldest = min((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    (oldest / "model.safetensors").unlink()
    resume(run.taskset, folder)
    renamed, lost = [event for event in events(folder) if event.startswith("corrupt")]
    assert renamed.endswith(f"lacks model.safetensors; it was renamed to corrupt-{oldest.name}")
    assert lost == f"corrupt: the best checkpoint by validation, of {oldest.name.replace('-', ' ')}, is lost"
    assert verify(folder).is_valid


def test_a_run_that_lost_all_its_checkpoints_is_refused_and_not_changed(
    whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(4, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    gone = r"resume: got .*, which reached step 5 and has no intact checkpoint: the checkpoint of step 4 is gone; "
    with pytest.raises(InvalidInput, match=gone + "put its checkpoints back, or start a new run"):
        resume(run.taskset, folder)
    assert verify(folder).violations == ("newest checkpoint: the checkpoint of step 4 was saved and is gone",)
    assert verify(folder).segments == 1


def test_a_missing_newest_checkpoint_is_reported(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(4, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-4")
    assert resume(run.taskset, folder) == run.result
    expected = ["corrupt: the checkpoint of step 4 is gone", "resumed: from step 3"]
    assert events(folder)[:2] == expected and verify(folder).is_valid


def test_a_checkpoint_of_another_run_is_not_used(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run, other = whole(algorithm="grpo"), whole(algorithm="ppo")
    folder, foreign = run.stopped(4, tmp_path), other.stopped(4, tmp_path / "other") / "checkpoints" / "step-4"
    shutil.rmtree(folder / "checkpoints" / "step-4")
    shutil.copytree(foreign, folder / "checkpoints" / "step-4")
    assert resume(run.taskset, folder) == run.result
    assert events(folder)[0].endswith("does not hold the weights of step 4; it was renamed to corrupt-step-4")


def test_a_complete_run_is_resumed_only_with_more_steps(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(algorithm="ppo", steps=3)
    folder = tmp_path / "run"
    train_with_images(micro, tmp_path, {"steps": 2, "algorithm": "ppo"})
    (tmp_path / "whole").rename(folder)
    with pytest.raises(InvalidInput, match="which is complete: it took its 2 steps; give more --steps"):
        resume(micro, folder)
    assert resume(micro, folder, steps=3) == run.result
    report = verify(folder)
    assert report.violations == () and report.segments == 2 and report.steps == 3


def test_another_task_set_or_model_is_refused_and_opens_no_segment(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(algorithm="grpo")
    folder = run.stopped(3, tmp_path)
    with pytest.raises(InvalidInput, match="taskset: got 'other'; resume with the task set of the run"):
        resume(replace(micro, name="other"), folder)
    with closing(reopen_run(folder)), pytest.raises(InvalidInput, match="which another process is writing"):
        resume(micro, folder)
    with monkeypatch.context() as patch, pytest.raises(InvalidInput, match="model: got another than the run's"):
        patch.setattr("agent_r1.trainer.single_process.weights_checksum", lambda model: "of other weights")
        resume(micro, folder)
    assert verify(folder).segments == 1
