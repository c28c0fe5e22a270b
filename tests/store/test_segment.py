"""A stopped run continues in a new segment, and what happened after its checkpoint is superseded."""

import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import record_all

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    PendingDropped,
    PolicyPublished,
    StepMetrics,
)
from agent_r1.core.inference import PolicyVersion
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.store.writer import RunWriteError, RunWriter


def resume_run(folder: Path, step: int) -> RunWriter:
    writer = reopen_run(folder)
    try:
        writer.open_segment(step, {"resumed from": step})
    except BaseException:
        writer.close()
        raise
    return writer


def fates(folder: Path) -> dict[tuple[int, int], str]:
    with closing(RunReader(folder)) as reader:
        return {fate.attempt.sort_key[:2]: fate.fate for fate in reader.fates()}


@pytest.fixture
def stopped(folder: Path, script: Any) -> Path:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1), *script.step(2), *script.step(3), script.sampling(4))
    return folder


@pytest.mark.parametrize(("step", "remaining"), [(0, 0), (1, 3), (2, 6), (3, 9)])
def test_fates_after_the_checkpoint_are_superseded_and_earlier_ones_remain(
    stopped: Path, step: int, remaining: int
) -> None:
    resume_run(stopped, step).close()
    assert len(fates(stopped)) == remaining
    report = verify(stopped)
    assert report.is_valid and report.segments == 2 and report.steps == step


def test_attempts_finished_under_known_weights_stay_pending(stopped: Path, script: Any) -> None:
    resume_run(stopped, 1).close()
    with closing(RunReader(stopped)) as reader:
        trajectories = [trajectory for trajectory in reader.trajectories() if trajectory.attempt.group_id == 3]
    assert trajectories == [script.trajectory(4, 0), script.trajectory(4, 1)]
    assert verify(stopped).attempts == {"trained": 2, "dropped": 1, "superseded": 7, "pending": 2}


def test_attempts_finished_under_newer_weights_are_superseded(stopped: Path) -> None:
    resume_run(stopped, 0).close()
    assert verify(stopped).attempts == {"trained": 0, "dropped": 0, "superseded": 12, "pending": 0}


def test_a_pending_attempt_is_trained_or_started_again_but_not_both(stopped: Path, script: Any) -> None:
    first, second = script.trajectory(4, 0), script.trajectory(4, 1)
    with closing(resume_run(stopped, 3)) as writer:
        record_all(
            writer,
            [AttemptFate(second.attempt, "trained", 4)],
            [AttemptStarted(first.attempt, "train", 1), AttemptFinished(first)],
        )
        with pytest.raises(RunWriteError, match="UNIQUE constraint failed"):
            record_all(writer, [AttemptFate(second.attempt, "trained", 4)])
    counts = verify(stopped).attempts
    assert counts == {"trained": 5, "dropped": 5, "superseded": 2, "pending": 1}


def test_an_attempt_with_a_current_fate_cannot_be_started_again(stopped: Path, script: Any) -> None:
    with closing(resume_run(stopped, 2)) as writer:
        with pytest.raises(RunWriteError, match="it got its fate in an earlier segment"):
            record_all(writer, script.sampling(1)[:1])
        with pytest.raises(RunWriteError):
            record_all(writer, [AttemptFate(script.trajectory(1, 0).attempt, "trained", 3)])
        record_all(writer, script.sampling(3))  # its fate came after the checkpoint
    assert verify(stopped).is_valid


def test_a_run_can_be_resumed_again_and_again(stopped: Path, script: Any) -> None:
    for step in (3, 3, 2, 1, 1):
        with closing(resume_run(stopped, step)) as writer:
            record_all(writer, *script.step(step + 1))
        assert verify(stopped).is_valid
        assert Counter(fates(stopped).values()).total() == 3 * (step + 1)
    assert verify(stopped).segments == 6


def test_metrics_and_versions_are_those_of_the_latest_segment(stopped: Path) -> None:
    with closing(resume_run(stopped, 2)) as writer:
        record_all(writer, [PolicyPublished(PolicyVersion(2, 3, "another three")), StepMetrics(3, {"loss": 0.5})])
    with closing(RunReader(stopped)) as reader:
        assert [(version.number, version.checksum) for version in reader.versions()] == [
            (0, "begin"),
            (1, "one"),
            (2, "another three"),
        ]
        assert [metrics.step for metrics in reader.metrics()] == [1, 2, 3]
        assert list(reader.reproducible_metrics())[2] == StepMetrics(3, {"loss": 0.5})


def test_a_step_the_run_never_took_cannot_be_resumed_from(stopped: Path) -> None:
    before = verify(stopped)
    with pytest.raises(InvalidInput, match="one of step 4, which the run never reached; resume from an older"):
        resume_run(stopped, 4)
    assert verify(stopped) == before
    resume_run(stopped, 3).close()


def test_a_missing_or_unreadable_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no run\.db"):
        resume_run(tmp_path, 0)
    (tmp_path / "run.db").write_text("not a database at all, " * 100, "utf-8")
    with pytest.raises(InvalidInput, match="file is not a database"):
        resume_run(tmp_path, 0)


def test_one_process_at_a_time_writes_a_run(folder: Path) -> None:
    with closing(create_run(folder, {})), pytest.raises(InvalidInput, match="which another process is writing"):
        RunWriter(folder / "run.db")
    RunWriter(folder / "run.db").close()


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="no /proc/locks, which shows who holds a lock")
def test_the_error_names_the_process_that_writes_the_run(folder: Path) -> None:
    other = folder.with_name("other")
    with closing(create_run(other, {})), closing(create_run(folder, {})), pytest.raises(InvalidInput) as refused:
        RunWriter(folder / "run.db")
    assert f"which another process is writing (process {os.getpid()}); wait" in str(refused.value)


def test_pending_attempts_are_dropped_with_a_reason(stopped: Path, script: Any) -> None:
    with closing(resume_run(stopped, 3)) as writer:
        record_all(
            writer, [AttemptStarted(script.trajectory(4, 2).attempt, "train", 1), PendingDropped(3, "the run was over")]
        )
    with closing(RunReader(stopped)) as reader:
        assert {fate.reason for fate in reader.fates() if fate.attempt.group_id == 3} == {"the run was over"}
    assert verify(stopped).attempts["pending"] == 0


def test_a_killed_resume_opens_no_segment(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.store.writer.SUPERSEDED", "SELECT * FROM nowhere")
    with pytest.raises(RunWriteError, match="nowhere"):
        resume_run(stopped, 2)
    monkeypatch.undo()
    assert verify(stopped).segments == 1 and len(fates(stopped)) == 9
