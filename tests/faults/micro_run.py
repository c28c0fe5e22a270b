"""A training run of a few small steps in a process that can be killed, and the checks of its files."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import Child, Countdown, Ended
from scenarios import MICRO, Scenario

from agent_r1.config import Layer, resolve
from agent_r1.core.events import AttemptFate, AttemptFinished, AttemptStarted, Event
from agent_r1.core.files import Disk
from agent_r1.store import writer
from agent_r1.store.folder import is_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest, verify
from agent_r1.store.writer import RunWriter
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import Progress, SilentProgress
from agent_r1.training.resume import resolve_resume_config

Break = Callable[[], None]
"""Breaks some code in the process that calls it."""


def intact() -> None:
    """Break nothing."""


def train_or_resume(folder: Path, scenario: Scenario, progress: Progress) -> None:
    """Train in ``folder``, or resume the run that is there."""
    torch.set_num_threads(1)
    taskset = scenario.taskset()
    place = {"run": str(folder)}
    if is_run(folder):
        run.resume(resolve_resume_config([Layer("faults", place)]), taskset, progress)
    else:
        layers = [Layer("faults", {**MICRO, **scenario.settings, **place}), Layer("recipe", taskset.recipe)]
        run.train(resolve(TrainConfig, layers), taskset, progress)


def count_positions(countdown: Countdown) -> None:
    """Call the countdown at every SQL statement, and before and after each disk operation."""
    open_writer = writer.open_writer

    def opened(path: Path) -> sqlite3.Connection:
        connection = open_writer(path)
        connection.set_trace_callback(countdown)
        return connection

    writer.open_writer = opened
    for name in ("make", "write", "sync", "rename", "remove"):
        setattr(Disk, name, _counted(getattr(Disk, name), countdown))


def _counted(operation: Callable[..., None], countdown: Countdown) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        countdown()
        operation(*arguments)
        countdown()

    return counted


def log_recorded(log: Path) -> None:
    """Write every event that was acknowledged as durable to a log outside of the run."""
    record = RunWriter.record
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def logged(self: RunWriter, *events: Event) -> None:
        await record(self, *events)
        lines = "".join(f"{self._segment} {line}\n" for event in events for line in _describe(event))
        os.write(descriptor, lines.encode())

    RunWriter.record = logged


def _describe(event: Event) -> Iterator[str]:
    match event:
        case AttemptStarted(attempt):
            yield f"started {attempt}"
        case AttemptFinished(trajectory):
            yield f"finished {trajectory.attempt}"
        case AttemptFate(attempt, fate):
            yield f"{fate} {attempt}"


RECORDED = """
    SELECT segment || ' started ' || attempt FROM attempts UNION ALL
    SELECT segment || ' finished ' || attempt FROM attempts JOIN outcomes ON attempt_id = attempts.id UNION ALL
    SELECT fates.segment || ' ' || fate || ' ' || attempt FROM fates JOIN attempts ON attempts.id = attempt_id
"""
"""The lines of that log as the database has them."""


def is_complete(folder: Path) -> bool:
    """Return whether there is a run that finished."""
    if not is_run(folder):
        return False
    with closing(RunReader(folder)) as reader:
        return reader.is_complete()


@dataclass(frozen=True, slots=True)
class RunResult:
    """The parts that are identical in equal runs."""

    digest: str
    model: str


def result_of(folder: Path) -> RunResult:
    with closing(RunReader(folder)) as reader:
        digest = run_digest(reader)
    return RunResult(digest, hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest())


def run_reference(folder: Path, scenario: Scenario) -> tuple[RunResult, int]:
    """Return the result of an uninterrupted run of a scenario, and the number of positions it passes."""
    ended = Child(_positions, folder, scenario).wait()
    if ended.error is not None:
        raise RuntimeError(ended.error)
    return result_of(folder), ended.value


def _positions(folder: Path, scenario: Scenario) -> int:
    countdown = Countdown(0)
    count_positions(countdown)
    train_or_resume(folder, scenario, SilentProgress())
    return countdown.count


def run_until_killed(position: int, folder: Path, log: Path, scenario: Scenario, breaking: Break) -> Ended:
    """Train or resume in a process that is killed at a position (0: never)."""

    def work() -> None:
        breaking()
        log_recorded(log)
        count_positions(Countdown(position))
        train_or_resume(folder, scenario, SilentProgress())

    return Child(work).wait()


def find_violations(folder: Path, log: Path) -> list[str]:
    """Return the violations in the files of a stopped run: broken invariants, and recorded events that are lost."""
    if not is_run(folder):
        return [f"{folder} is gone"] if log.exists() and log.read_text("utf-8") else []
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        present = {line for (line,) in connection.execute(RECORDED)}
    lost = set(log.read_text("utf-8").splitlines()) - present if log.exists() else set()
    return [*verify(folder).violations, *(f"recorded and lost: {name}" for name in sorted(lost))]
