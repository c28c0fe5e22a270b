"""A run ends after validations that are no longer better, also if it was stopped and resumed on the way."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from resuming import Whole, config_of, resume

from agent_r1.config import Layer
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.core.events import STOPPED_EARLY
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader, read_results
from agent_r1.store.verification import verify
from agent_r1.training import checkpoint_manager as manager, run
from agent_r1.training.progress import SilentProgress, StepReport
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.tables import Cell

# At this learning rate all validations are equal, and none is better than the first: step 3 is the last.
EARLY: Mapping[str, Any] = {
    "steps": 6,
    "evaluate_every": 1,
    "evaluate_n": 2,
    "stop_after": 2,
    "checkpoint_every": 2,
    "trainer.learning_rate": 1e-12,
}


class Saying(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def print_line(self, text: str) -> None:
        self.said.append(text)


class Stopping(SilentProgress):
    def on_step(self, report: StepReport) -> None:
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_ends_after_validations_that_are_not_better_and_is_complete(
    whole: Callable[..., Whole], tmp_path: Path
) -> None:
    folder = whole(**EARLY).place / "whole"
    with closing(RunReader(folder)) as reader:
        events = [event.detail for event in reader.events() if event.kind == STOPPED_EARLY]
        validated = reader.curve("validation_em")
        assert reader.is_complete() and len(list(read_results(reader, "table"))) == 1
    assert list(validated) == [1, 2, 3] and len(set(validated.values())) == 1
    early = "at step 3: 2 validations were not better than one before; the best, of equal ones the last, is "
    assert len(events) == 1 and events[0].startswith(early) and events[0].endswith(" at step 3")
    assert checkpoint_step(list_checkpoints(folder)[0]) == 3 and (folder / "model").is_dir()
    assert verify(folder).violations == () and verify(folder).steps == 3
    copy = shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="it took its 3 steps; give more --steps and another --stop_after"):
        resolve_resume_config([Layer("test", {"run": str(copy)})])
    resume(whole(**EARLY).taskset, copy, stop_after=0)
    assert verify(copy).violations == () and verify(copy).steps == 6


def test_a_run_that_is_resumed_ends_at_the_same_step(
    micro: TaskSet, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    expected = whole(**EARLY)
    killed = expected.stopped(2, tmp_path)
    assert resume(expected.taskset, killed) == expected.result and verify(killed).steps == 3
    stopped = tmp_path / "at the end"
    with pytest.raises(Interrupted):
        run.train(config_of(micro, stopped, EARLY), micro, Stopping())
    assert resume(micro, stopped) == expected.result and verify(stopped).steps == 3


def test_a_better_validation_begins_the_count_again_and_without_validations_the_setting_is_refused(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, measured = Saying(), iter((0.1, 0.1, 0.2, 0.2, 0.1))
    monkeypatch.setattr(manager, "make_cell", lambda _: Cell(next(measured), 0.0, 2, 0.0, 1.0))
    run.train(config_of(micro, tmp_path / "run", EARLY), micro, progress)
    with closing(RunReader(tmp_path / "run")) as reader:
        assert list(reader.curve("validation_em").values()) == [0.1, 0.1, 0.2, 0.2, 0.1]
        (event,) = (event.detail for event in reader.events() if event.kind == STOPPED_EARLY)
    assert event.endswith("the best, of equal ones the last, is 0.200 at step 4")
    assert f"stopped {event}" in progress.said
    with pytest.raises(InvalidInput, match=r"stop_after: got 2; give evaluate_every too"):
        run.train(config_of(micro, tmp_path / "none", EARLY | {"evaluate_every": 0}), micro, SilentProgress())
