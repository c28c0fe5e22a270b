"""A run that stopped goes on in a new lineage; what its checkpoint does not know of stands no more."""

import asyncio
import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    PendingDropped,
    PolicyPublished,
    StepMetrics,
)
from agent_r1.store import Ledger, LedgerError, RunReader, create_run, reopen_run
from agent_r1.store.ledger import LOCKS
from agent_r1.store.verify import verify


def tell(ledger: Ledger, *chapters: list[Event]) -> None:
    for events in chapters:
        asyncio.run(ledger.record(*events))


def resume_run(folder: Path, step: int) -> Ledger:
    ledger = reopen_run(folder)
    try:
        ledger.open_lineage(step, {"resumed from": step})
    except BaseException:
        ledger.close()
        raise
    return ledger


def fates(folder: Path) -> dict[tuple[int, int], str]:
    with closing(RunReader(folder)) as reader:
        return {fate.attempt.order[:2]: fate.fate for fate in reader.fates()}


@pytest.fixture
def stopped(folder: Path, script: Any) -> Path:
    """A run that stopped when it had taken three steps and acted for the fourth, by the weights of step 1."""
    with closing(create_run(folder, {})) as ledger:
        tell(ledger, script.begin(), *script.step(1), *script.step(2), *script.step(3), script.acted(4))
    return folder


@pytest.mark.parametrize(("step", "stand"), [(0, 0), (1, 3), (2, 6), (3, 9)])
def test_fates_after_the_checkpoint_are_superseded_and_those_before_stand(stopped: Path, step: int, stand: int) -> None:
    resume_run(stopped, step).close()
    assert len(fates(stopped)) == stand
    verdict = verify(stopped)
    assert verdict.holds and verdict.lineages == 2 and verdict.steps == step


def test_what_had_finished_under_known_weights_stays_pending(stopped: Path, script: Any) -> None:
    resume_run(stopped, 1).close()
    with closing(RunReader(stopped)) as reader:
        lived = [trajectory for trajectory in reader.trajectories() if trajectory.attempt.group == 3]
    assert lived == [script.lived(4, 0), script.lived(4, 1)]
    assert verify(stopped).attempts == {"trained": 2, "dropped": 1, "superseded": 7, "pending": 2}


def test_what_had_finished_under_newer_weights_is_superseded(stopped: Path) -> None:
    resume_run(stopped, 0).close()
    assert verify(stopped).attempts == {"trained": 0, "dropped": 0, "superseded": 12, "pending": 0}


def test_a_pending_attempt_is_trained_or_dispatched_again_but_not_both(stopped: Path, script: Any) -> None:
    first, second = script.lived(4, 0), script.lived(4, 1)
    with closing(resume_run(stopped, 3)) as ledger:
        tell(
            ledger,
            [AttemptFate(second.attempt, "trained", 4)],
            [AttemptStarted(first.attempt, "train", 1), AttemptFinished(first)],
        )
        with pytest.raises(LedgerError, match="UNIQUE constraint failed"):
            tell(ledger, [AttemptFate(second.attempt, "trained", 4)])
    counted = verify(stopped).attempts
    assert counted == {"trained": 5, "dropped": 5, "superseded": 2, "pending": 1}


def test_an_attempt_whose_fate_stands_cannot_be_dispatched_again(stopped: Path, script: Any) -> None:
    with closing(resume_run(stopped, 2)) as ledger:
        with pytest.raises(LedgerError, match="it met its fate in an earlier lineage"):
            tell(ledger, script.acted(1)[:1])
        with pytest.raises(LedgerError):
            tell(ledger, [AttemptFate(script.lived(1, 0).attempt, "trained", 3)])
        tell(ledger, script.acted(3))  # its fate was met after the checkpoint
    assert verify(stopped).holds


def test_a_run_can_be_resumed_again_and_again(stopped: Path, script: Any) -> None:
    for step in (3, 3, 2, 1, 1):
        with closing(resume_run(stopped, step)) as ledger:
            tell(ledger, *script.step(step + 1))
        assert verify(stopped).holds
        assert Counter(fates(stopped).values()).total() == 3 * (step + 1)
    assert verify(stopped).lineages == 6


def test_metrics_and_versions_are_those_of_the_newest_lineage(stopped: Path) -> None:
    with closing(resume_run(stopped, 2)) as ledger:
        tell(ledger, [PolicyPublished(2, 3, "another three"), StepMetrics(3, {"loss": 0.5})])
    with closing(RunReader(stopped)) as reader:
        assert [(made.version, made.digest) for made in reader.versions()] == [
            (0, "begin"),
            (1, "one"),
            (2, "another three"),
        ]
        assert [measured.step for measured in reader.metrics()] == [1, 2, 3]
        assert list(reader.exact_metrics())[2] == StepMetrics(3, {"loss": 0.5})


def test_a_step_the_run_never_took_cannot_be_resumed_from(stopped: Path) -> None:
    before = verify(stopped)
    with pytest.raises(InvalidInput, match="one of step 4, to which the run never came; resume from an older"):
        resume_run(stopped, 4)
    assert verify(stopped) == before
    resume_run(stopped, 3).close()


def test_nothing_there_and_nothing_readable_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no run\.db"):
        resume_run(tmp_path, 0)
    (tmp_path / "run.db").write_text("not a database at all, " * 100)
    with pytest.raises(InvalidInput, match="file is not a database"):
        resume_run(tmp_path, 0)


def test_one_process_at_a_time_writes_a_run(folder: Path) -> None:
    with closing(create_run(folder, {})), pytest.raises(InvalidInput, match="which another process is writing"):
        Ledger(folder / "run.db")
    Ledger(folder / "run.db").close()


@pytest.mark.skipif(not LOCKS.exists(), reason="only Linux says who holds a lock")
def test_the_process_that_writes_a_run_is_named(folder: Path) -> None:
    other = folder.with_name("other")
    with closing(create_run(other, {})), closing(create_run(folder, {})), pytest.raises(InvalidInput) as refused:
        Ledger(folder / "run.db")
    assert f"which another process is writing (process {os.getpid()}); wait" in str(refused.value)


def test_a_kernel_that_does_not_say_who_writes_a_run_refuses_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.store.ledger.LOCKS", folder / "none")
    with closing(create_run(folder, {})), pytest.raises(InvalidInput, match="another process is writing; wait"):
        Ledger(folder / "run.db")


def test_what_is_left_over_is_dropped_with_a_reason(stopped: Path, script: Any) -> None:
    with closing(resume_run(stopped, 3)) as ledger:
        tell(ledger, [AttemptStarted(script.lived(4, 2).attempt, "train", 1), PendingDropped(3, "the run was over")])
    with closing(RunReader(stopped)) as reader:
        assert {fate.reason for fate in reader.fates() if fate.attempt.group == 3} == {"the run was over"}
    assert verify(stopped).attempts["pending"] == 0


def test_a_killed_resume_opens_no_lineage(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.store.segment.SUPERSEDE", "SELECT * FROM nowhere")
    with pytest.raises(LedgerError, match="nowhere"):
        resume_run(stopped, 2)
    monkeypatch.undo()
    assert verify(stopped).lineages == 1 and len(fates(stopped)) == 9
