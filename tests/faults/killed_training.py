"""T1 and T18: a training run is killed, anywhere and after every step, and resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fault_case import NOTHING, Case, Control, Outcome, Size
from kill_histories import Judge, kill_anywhere, outcome_of
from micro_run import Break, RunResult, find_violations, intact, result_of, run_reference, train_or_resume
from processes import Child
from scenarios import EVERYTHING, GRPO, PPO, REFILL, SPARSE, Scenario

from agent_r1.core.events import Event
from agent_r1.store.writer import RunWriter, _Submission
from agent_r1.trainer.protocol import TrainerState
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training import checkpoint_manager as restore
from agent_r1.training.progress import SilentProgress, StepReport

OTHER_RESULT = "another digest, or other weights"


def equal_result(scenario: Scenario, expected: RunResult) -> Judge:
    """Return a judge that compares a run with an uninterrupted one."""

    def judge(folder: Path) -> Outcome:
        return Outcome(0, () if result_of(folder) == expected else (OTHER_RESULT,))

    return judge


def kill_runs(size: Size, scenarios: Sequence[Scenario], breaking: Break = intact) -> Outcome:
    """Kill deterministic runs anywhere."""
    return kill_anywhere(size, scenarios, equal_result, breaking)


def kill_after_steps(size: Size, scenarios: Sequence[Scenario], breaking: Break = intact) -> Outcome:
    """Kill runs of each scenario right after a step, before its checkpoint is started."""
    share = max(1, size.injections // len(scenarios))
    children = [Child(_kill_each, scenario, share, breaking) for scenario in scenarios[: size.injections]]
    return sum((outcome_of(child) for child in children), NOTHING)


STEPS = 10
STEPPED: Sequence[Scenario] = tuple(one.but(steps=STEPS) for one in (GRPO, EVERYTHING, PPO, REFILL, SPARSE))


class KillingProgress(SilentProgress):
    """Progress that kills the process after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _kill_each(scenario: Scenario, injections: int, breaking: Break) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        expected, _ = run_reference(Path(place) / "whole", scenario)
        steps = [1 + (2 * number + 1) * STEPS // (2 * injections) for number in range(injections)]
        return sum((_kill_after(step, Path(place), scenario, expected, breaking) for step in steps), NOTHING)


def _kill_after(step: int, place: Path, scenario: Scenario, expected: RunResult, breaking: Break) -> Outcome:
    folder = place / f"step-{step}"

    def train(progress: SilentProgress) -> None:
        breaking()
        train_or_resume(folder, scenario, progress)

    killed = Child(train, KillingProgress(step)).wait().killed
    broken = find_violations(folder, place / "no log")
    ended = Child(train, SilentProgress()).wait()
    broken += [ended.error] if ended.error is not None else find_violations(folder, place / "no log")
    if ended.error is None and result_of(folder) != expected:
        broken.append(OTHER_RESULT)
    lines = tuple(f"{scenario.name} after step {step}: {line}" for line in broken)
    return Outcome(int(killed), lines, {scenario.name: int(killed)})


def without_moments() -> None:
    """Resuming resets the optimizer's moments."""
    load_state = PolicyUpdater.load_state

    def load_without_moments(self: PolicyUpdater, state: TrainerState) -> None:
        zeros = {name: torch.zeros_like(t) if "optimizer." in name else t for name, t in state.tensors.items()}
        load_state(self, replace(state, tensors=zeros))

    PolicyUpdater.load_state = load_without_moments


def _resume_at(**changes: Any) -> None:
    """Resuming changes the progress of the checkpoint."""
    load = restore.load_checkpoint

    def loaded(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, progress=replace(saved.progress, **changes))

    restore.load_checkpoint = loaded


def without_data_position() -> None:
    """Resuming restarts the data."""
    _resume_at(groups=0)


def without_best() -> None:
    """Resuming forgets the best step."""
    _resume_at(best=None)


def early_acknowledgement() -> None:
    """Events are acknowledged before they are written, and the disk is slow."""
    commit = RunWriter._commit
    commits: list[asyncio.Task[None]] = []  # asyncio keeps only weak references to tasks

    def slow(self: RunWriter, batch: Sequence[_Submission]) -> Any:
        time.sleep(0.02)
        return commit(self, batch)

    async def record(self: RunWriter, *events: Event) -> None:
        self._waiting.append(_Submission(events))
        commits.append(asyncio.create_task(self._worker.run(self._commit_waiting)))  # not awaited

    RunWriter.record, RunWriter._commit = record, slow


REFUSED = "it got its fate in an earlier segment"
"""The error for an attempt that is started again although it has a fate."""

LOST = "recorded and lost"

KILLED_ANYWHERE = Case(
    "T1",
    "SIGKILL of the trainer at an SQL statement or a disk operation",
    "the invariants hold; nothing recorded is lost; digest and weights equal those of an uninterrupted run",
    lambda size: kill_runs(size, (GRPO, PPO, SPARSE, EVERYTHING)),
    300,
    4,
    (
        Control("moments not restored", OTHER_RESULT, lambda size: kill_runs(size, (GRPO, PPO), without_moments), 2),
        Control("best not restored", OTHER_RESULT, lambda size: kill_runs(size, (EVERYTHING,), without_best), 5),
        Control("acknowledged before written", LOST, lambda size: kill_runs(size, (GRPO,), early_acknowledgement), 3),
    ),
)

KILLED_AFTER_STEPS = Case(
    "T18",
    f"SIGKILL after each of {STEPS} steps: {', '.join(scenario.name for scenario in STEPPED)}",
    "digest and weights equal those of an uninterrupted run",
    lambda size: kill_after_steps(size, STEPPED),
    len(STEPPED) * STEPS,
    2,
    (
        Control(
            "data position not restored",
            REFUSED,
            lambda size: kill_after_steps(size, STEPPED, without_data_position),
            1,
        ),
        Control("moments not restored", OTHER_RESULT, lambda size: kill_after_steps(size, STEPPED, without_moments), 1),
    ),
)
