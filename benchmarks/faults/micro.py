"""A training run of a few small steps, in a process that can be killed, and what is asked of it afterwards."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from processes import Child, Countdown, Ended

from agent_r1.config import Layer, resolve
from agent_r1.core.record import Event, Finished
from agent_r1.core.world import World
from agent_r1.store import Ledger, RunReader, is_run, ledger
from agent_r1.store.digest import run_digest
from agent_r1.store.disk import Disk
from agent_r1.store.verify import verify
from agent_r1.tasks import build
from agent_r1.train import run
from agent_r1.train.config import TrainConfig
from agent_r1.train.report import Progress, Silence
from agent_r1.train.resume import resumed

MICRO: Mapping[str, Any] = {
    "steps": 4,
    "groups_per_step": 2,
    "group_size": 4,
    "max_tokens": 20,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "checkpoint_every": 1,
    "reward_weights.found": 1.0,
}
"""Searches that find a page are rewarded, so that every step teaches something."""

Break = Callable[[], None]
"""Breaks the code in the process it is called in."""


def intact() -> None:
    """Break nothing."""


def micro_world() -> World:
    """TinyWiki, whose final table is one cell."""
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))


def go(folder: Path, settings: Mapping[str, Any], progress: Progress) -> None:
    """Train in ``folder``, or go on with the run that is there."""
    torch.set_num_threads(1)
    world = micro_world()
    place = {"run": str(folder)}
    if is_run(folder):
        run.resume(resumed([Layer("faults", place)]), world, progress)
    else:
        layers = [Layer("faults", {**MICRO, **settings, **place}), Layer("recipe", world.recipe)]
        run.train(resolve(TrainConfig, layers), world, progress)


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
    """Note every trajectory that was acknowledged as durable, outside of the run."""
    record = Ledger.record
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def noted(self: Ledger, *events: Event) -> None:
        await record(self, *events)
        said = "".join(f"{event.trajectory.attempt}\n" for event in events if isinstance(event, Finished))
        os.write(descriptor, said.encode())

    Ledger.record = noted


def complete(folder: Path) -> bool:
    """Whether there is a run that came to its end."""
    if not is_run(folder):
        return False
    with closing(RunReader(folder)) as reader:
        return reader.completed()


@dataclass(frozen=True, slots=True)
class Made:
    """What equal runs have in common."""

    digest: str
    model: str


def made_by(folder: Path) -> Made:
    with closing(RunReader(folder)) as reader:
        digest = run_digest(reader)
    return Made(digest, hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest())


def reference(folder: Path, settings: Mapping[str, Any]) -> tuple[Made, int]:
    """What a run of these settings makes where nothing stops it, and how many positions it passes."""
    ended = Child(_positions, folder, settings).wait()
    if ended.error is not None:
        raise RuntimeError(ended.error)
    return made_by(folder), ended.value


def _positions(folder: Path, settings: Mapping[str, Any]) -> int:
    countdown = Countdown(0)
    watch(countdown)
    go(folder, settings, Silence())
    return countdown.count


def killed_at(position: int, folder: Path, log: Path, settings: Mapping[str, Any], breaking: Break) -> Ended:
    """Train or go on, in a process that is killed at a position (0: never)."""

    def work() -> None:
        breaking()
        log_acknowledged(log)
        watch(Countdown(position))
        go(folder, settings, Silence())

    return Child(work).wait()


def found_broken(folder: Path, log: Path) -> list[str]:
    """What a stopped run's files say against it: rules of the ledger, and trajectories that were acknowledged."""
    if not is_run(folder):
        return [f"{folder} is gone"] if log.exists() and log.read_text() else []
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        there = {
            name for (name,) in connection.execute("SELECT attempt FROM attempts JOIN outcomes ON attempt_id = id")
        }
    lost = set(log.read_text().split()) - there if log.exists() else set()
    return [*verify(folder).violations, *(f"acknowledged and lost: {name}" for name in sorted(lost))]
