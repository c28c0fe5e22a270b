"""A training run of a few small steps, in a process that can be killed, and what is asked of it afterwards."""

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
from agent_r1.store import RunWriter, RunReader, is_run
from agent_r1.store import writer as ledger
from agent_r1.store.atomic_fs import Disk
from agent_r1.store.digest import run_digest
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import Progress, SilentProgress
from agent_r1.training.resume import resolve_resume_config

Break = Callable[[], None]
"""Breaks the code in the process it is called in."""


def intact() -> None:
    """Break nothing."""


def go(folder: Path, scenario: Scenario, progress: Progress) -> None:
    """Train in ``folder``, or go on with the run that is there."""
    torch.set_num_threads(1)
    taskset = scenario.taskset()
    place = {"run": str(folder)}
    if is_run(folder):
        run.resume(resolve_resume_config([Layer("faults", place)]), taskset, progress)
    else:
        layers = [Layer("faults", {**MICRO, **scenario.settings, **place}), Layer("recipe", taskset.recipe)]
        run.train(resolve(TrainConfig, layers), taskset, progress)


def watch(countdown: Countdown) -> None:
    """Let the countdown see every statement of the ledger, and each operation of the disk before it and after it."""
    open_writer = ledger.open_writer

    def opened(path: Path) -> sqlite3.Connection:
        connection = open_writer(path)
        connection.set_trace_callback(countdown)
        return connection

    ledger.open_writer = opened
    for name in ("make", "write", "sync", "rename", "remove"):
        setattr(Disk, name, _counted(getattr(Disk, name), countdown))


def _counted(operation: Callable[..., None], countdown: Countdown) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        countdown()
        operation(*arguments)
        countdown()

    return counted


def log_acknowledged(log: Path) -> None:
    """Note what was acknowledged as durable of each attempt, and in which segment, outside of the run."""
    record = RunWriter.record
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def noted(self: RunWriter, *events: Event) -> None:
        await record(self, *events)
        said = "".join(f"{self._lineage} {line}\n" for event in events for line in _acknowledged(event))
        os.write(descriptor, said.encode())

    RunWriter.record = noted


def _acknowledged(event: Event) -> Iterator[str]:
    match event:
        case AttemptStarted(attempt):
            yield f"dispatched {attempt}"
        case AttemptFinished(trajectory):
            yield f"finished {trajectory.attempt}"
        case AttemptFate(attempt, fate):
            yield f"{fate} {attempt}"


WRITTEN = """
    SELECT segment || ' dispatched ' || attempt FROM attempts UNION ALL
    SELECT segment || ' finished ' || attempt FROM attempts JOIN outcomes ON attempt_id = id UNION ALL
    SELECT fates.segment || ' ' || fate || ' ' || attempt FROM fates JOIN attempts ON id = attempt_id
"""
"""What a ledger says of attempts, as it is noted when it is acknowledged."""


def complete(folder: Path) -> bool:
    """Whether there is a run that came to its end."""
    if not is_run(folder):
        return False
    with closing(RunReader(folder)) as reader:
        return reader.is_complete()


@dataclass(frozen=True, slots=True)
class Made:
    """What equal runs have in common."""

    digest: str
    model: str


def made_by(folder: Path) -> Made:
    with closing(RunReader(folder)) as reader:
        digest = run_digest(reader)
    return Made(digest, hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest())


def reference(folder: Path, scenario: Scenario) -> tuple[Made, int]:
    """What a run of a scenario makes where nothing stops it, and how many positions it passes."""
    ended = Child(_positions, folder, scenario).wait()
    if ended.error is not None:
        raise RuntimeError(ended.error)
    return made_by(folder), ended.value


def _positions(folder: Path, scenario: Scenario) -> int:
    countdown = Countdown(0)
    watch(countdown)
    go(folder, scenario, SilentProgress())
    return countdown.count


def killed_at(position: int, folder: Path, log: Path, scenario: Scenario, breaking: Break) -> Ended:
    """Train or go on, in a process that is killed at a position (0: never)."""

    def work() -> None:
        breaking()
        log_acknowledged(log)
        watch(Countdown(position))
        go(folder, scenario, SilentProgress())

    return Child(work).wait()


def found_broken(folder: Path, log: Path) -> list[str]:
    """What a stopped run's files say against it: rules of the ledger, and what was acknowledged of attempts."""
    if not is_run(folder):
        return [f"{folder} is gone"] if log.exists() and log.read_text() else []
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        there = {line for (line,) in connection.execute(WRITTEN)}
    lost = set(log.read_text().splitlines()) - there if log.exists() else set()
    return [*verify(folder).violations, *(f"acknowledged and lost: {name}" for name in sorted(lost))]
