"""T1 and T18: a training run is killed, anywhere and after every step, and goes on."""

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
from case import NOTHING, Case, Control, Outcome, Size
from histories import Judge, anywhere, outcome_of
from micro import Break, Made, found_broken, go, intact, made_by, reference
from processes import Child
from scenarios import EVERYTHING, GRPO, PPO, REFILL, SELDOM, Scenario

from agent_r1.core.events import Event
from agent_r1.store.writer import RunWriter, Submission
from agent_r1.trainer.learner import Learner, LearnerState
from agent_r1.training.checkpoint import restore
from agent_r1.training.progress import SilentProgress, StepReport

OTHERWISE = "another digest, or other weights"


def as_if_nothing(scenario: Scenario, made: Made) -> Judge:
    """A run has made what one makes that nothing stops."""

    def judge(folder: Path) -> Outcome:
        return Outcome(0, () if made_by(folder) == made else (OTHERWISE,))

    return judge


def killed(size: Size, scenarios: Sequence[Scenario], breaking: Break = intact) -> Outcome:
    """Runs in deterministic mode that are killed anywhere."""
    return anywhere(size, scenarios, as_if_nothing, breaking)


def after_every_step(size: Size, scenarios: Sequence[Scenario], breaking: Break = intact) -> Outcome:
    """Kill runs of each scenario right after a step, before its checkpoint is begun; of the first where it is one."""
    share = max(1, size.injections // len(scenarios))
    children = [Child(_stepping, scenario, share, breaking) for scenario in scenarios[: size.injections]]
    return sum((outcome_of(child) for child in children), NOTHING)


STEPS = 10
STEPPED: Sequence[Scenario] = tuple(one.but(steps=STEPS) for one in (GRPO, EVERYTHING, PPO, REFILL, SELDOM))


class Killing(SilentProgress):
    """Progress that ends with a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _stepping(scenario: Scenario, injections: int, breaking: Break) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        made, _ = reference(Path(place) / "whole", scenario)
        steps = [1 + (2 * number + 1) * STEPS // (2 * injections) for number in range(injections)]
        return sum((_stopped(step, Path(place), scenario, made, breaking) for step in steps), NOTHING)


def _stopped(step: int, place: Path, scenario: Scenario, made: Made, breaking: Break) -> Outcome:
    folder = place / f"step-{step}"

    def going(progress: SilentProgress) -> None:
        breaking()
        go(folder, scenario, progress)

    killed = Child(going, Killing(step)).wait().killed
    broken = found_broken(folder, place / "no log")
    ended = Child(going, SilentProgress()).wait()
    broken += [ended.error] if ended.error is not None else found_broken(folder, place / "no log")
    if ended.error is None and made_by(folder) != made:
        broken.append(OTHERWISE)
    said = tuple(f"{scenario.name} after step {step}: {line}" for line in broken)
    return Outcome(int(killed), said, {scenario.name: int(killed)})


def without_moments() -> None:
    """The optimizer begins anew where a run goes on."""
    whole = Learner.restore

    def restored(self: Learner, state: LearnerState) -> None:
        zeros = {name: torch.zeros_like(t) if "optimizer." in name else t for name, t in state.tensors.items()}
        whole(self, replace(state, tensors=zeros))

    Learner.restore = restored


def _restored_at(**changes: Any) -> None:
    """A run goes on from another position than it had come to."""
    load = restore.load_checkpoint

    def loaded(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, position=replace(saved.position, **changes))

    restore.load_checkpoint = loaded


def without_cursor() -> None:
    """The data begins anew where a run goes on."""
    _restored_at(groups=0)


def without_best() -> None:
    """The best by validation is forgotten where a run goes on."""
    _restored_at(best=None)


def hasty_ledger() -> None:
    """What was only handed to the ledger counts as written, and the disk is slow."""
    commit = RunWriter._commit

    def slow(self: RunWriter, batch: Sequence[Submission]) -> Any:
        time.sleep(0.02)
        return commit(self, batch)

    async def record(self: RunWriter, *events: Event) -> None:
        self._waiting.put(Submission(events, asyncio.get_running_loop().create_future()))

    RunWriter.record, RunWriter._commit = record, slow


REFUSED_AGAIN = "it met its fate in an earlier segment"
"""What the ledger says of an attempt that is dispatched again though its fate stands."""

LOST = "acknowledged and lost"

KILLED_ANYWHERE = Case(
    "T1",
    "SIGKILL of the trainer at a statement of the ledger or an operation of the disk",
    "the ledger's law; nothing acknowledged is lost; digest and weights as if nothing had happened",
    lambda size: killed(size, (GRPO, PPO, SELDOM, EVERYTHING)),
    300,
    4,
    (
        Control("moments not restored", OTHERWISE, lambda size: killed(size, (GRPO, PPO), without_moments), 2),
        Control("best not restored", OTHERWISE, lambda size: killed(size, (EVERYTHING,), without_best), 5),
        Control("acknowledged before written", LOST, lambda size: killed(size, (GRPO,), hasty_ledger), 3),
    ),
)

KILLED_AFTER_STEPS = Case(
    "T18",
    f"SIGKILL after each of {STEPS} steps: {', '.join(scenario.name for scenario in STEPPED)}",
    "digest and weights as if nothing had happened",
    lambda size: after_every_step(size, STEPPED),
    len(STEPPED) * STEPS,
    2,
    (
        Control(
            "data cursor not restored", REFUSED_AGAIN, lambda size: after_every_step(size, STEPPED, without_cursor), 1
        ),
        Control("moments not restored", OTHERWISE, lambda size: after_every_step(size, STEPPED, without_moments), 1),
    ),
)
