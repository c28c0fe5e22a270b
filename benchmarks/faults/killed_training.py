"""T1 and T18: a training run is killed, anywhere and after every step, and goes on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from case import Case, Control, Outcome, Size
from micro import Break, Made, complete, found_broken, go, intact, killed_at, made_by, reference
from processes import Child

from agent_r1.core.record import Event
from agent_r1.learn.learner import Learner, LearnerState
from agent_r1.store.ledger import Ledger, Submission
from agent_r1.train import restore
from agent_r1.train.report import Silence, StepReport

Settings = Mapping[str, Any]

ALGORITHMS: Sequence[Settings] = ({"algorithm": "grpo"}, {"algorithm": "ppo"})

HOURS = 4 * 3600.0
"""Seconds that all histories of a process may take."""

SPARE = 1
"""More histories than kills that have to happen: with other luck in group commits a run passes fewer positions."""

AGAIN = 0.3
"""How often the process that goes on is killed too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Histories to live through: where each is killed first, of how many positions, and what it must come to."""

    settings: Settings
    made: Made
    positions: int
    kills: Sequence[int]
    seed: int


def anywhere(size: Size, breaking: Break = intact) -> Outcome:
    """Kill runs at positions that are spread evenly over all that a run passes, and drawn at random within that."""
    return sum((_anywhere(settings, size, breaking) for settings in ALGORITHMS), Outcome(0, ()))


def _anywhere(settings: Settings, size: Size, breaking: Break) -> Outcome:
    share = -(-size.injections // len(ALGORITHMS)) + SPARE
    with tempfile.TemporaryDirectory() as place:
        made, positions = reference(Path(place) / "run", settings)
        drawn = random.Random(f"{size.seed} {settings}")
        kills = [1 + int((number + drawn.random()) / share * positions) for number in range(share)]
        plans = [Plan(settings, made, positions, kills[job :: size.jobs], size.seed) for job in range(size.jobs)]
        children = [Child(_live, plan, Path(place) / str(job), breaking) for job, plan in enumerate(plans)]
        return sum((_outcome(child) for child in children), Outcome(0, ()))


def _outcome(child: Child) -> Outcome:
    ended = child.wait(HOURS)
    return ended.value if ended.error is None else Outcome(0, (ended.error,))


def _live(plan: Plan, place: Path, breaking: Break) -> Outcome:
    place.mkdir()
    return sum((_history(kill, plan, place, breaking) for kill in plan.kills), Outcome(0, ()))


def _history(kill: int, plan: Plan, place: Path, breaking: Break) -> Outcome:
    """One run that is killed, perhaps again as it goes on, and must come to what it would have come to."""
    folder, log = place / "run", place / "log"
    drawn = random.Random(f"{plan.seed} {kill}")
    fired, position, broken = 0, kill, []
    while not complete(folder):  # the last positions are those of closing a run that is complete
        ended = killed_at(position, folder, log, plan.settings, breaking)
        fired += ended.killed
        broken += found_broken(folder, log)
        position = drawn.randint(1, plan.positions) if drawn.random() < AGAIN else 0
        if not ended.killed and ended.error is not None:
            broken.append(ended.error)
            break
    if complete(folder) and made_by(folder) != plan.made:
        broken.append("another digest, or other weights")
    shutil.rmtree(place)
    place.mkdir()
    where = f"{plan.settings['algorithm']} killed at {kill} of {plan.positions}"
    return Outcome(fired, tuple(f"{where}: {line}" for line in broken))


def after_every_step(size: Size, breaking: Break = intact) -> Outcome:
    """Kill runs of each algorithm right after a step, before its checkpoint is begun; of the first where it is one."""
    share = max(1, size.injections // len(STEPPED))
    children = [Child(_stepping, settings, share, breaking) for settings in STEPPED[: size.injections]]
    return sum((_outcome(child) for child in children), Outcome(0, ()))


STEPS = 10
STEPPED: Sequence[Settings] = (
    {"algorithm": "grpo", "steps": STEPS},
    {"algorithm": "ppo", "steps": STEPS},
    {
        "algorithm": "grpo",
        "steps": STEPS,
        "reward_weights.found": 0.0,
        "row": {"refill": 2, "filters.zero_variance": 0.0},
    },
)
"""The third refills its steps."""


class Killing(Silence):
    """Progress that ends with a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _stepping(settings: Settings, injections: int, breaking: Break) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        made, _ = reference(Path(place) / "whole", settings)
        steps = [1 + (2 * number + 1) * STEPS // (2 * injections) for number in range(injections)]
        return sum((_stopped(step, Path(place), settings, made, breaking) for step in steps), Outcome(0, ()))


def _stopped(step: int, place: Path, settings: Settings, made: Made, breaking: Break) -> Outcome:
    folder = place / f"step-{step}"

    def going(progress: Silence) -> None:
        breaking()
        go(folder, settings, progress)

    killed = Child(going, Killing(step)).wait().killed
    broken = found_broken(folder, place / "no log")
    ended = Child(going, Silence()).wait()
    broken += [ended.error] if ended.error is not None else found_broken(folder, place / "no log")
    if ended.error is None and made_by(folder) != made:
        broken.append("another digest, or other weights")
    return Outcome(int(killed), tuple(f"{settings['algorithm']} after step {step}: {line}" for line in broken))


def without_moments() -> None:
    """The optimizer begins anew where a run goes on."""
    whole = Learner.restore

    def restored(self: Learner, state: LearnerState) -> None:
        zeros = {name: torch.zeros_like(t) if "optimizer." in name else t for name, t in state.tensors.items()}
        whole(self, replace(state, tensors=zeros))

    Learner.restore = restored


def without_cursor() -> None:
    """The data begins anew where a run goes on."""
    load = restore.load_checkpoint

    def loaded(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, position=replace(saved.position, groups=0))

    restore.load_checkpoint = loaded


def hasty_ledger() -> None:
    """What was only handed to the ledger counts as written, and the disk is slow."""
    commit = Ledger._commit

    def slow(self: Ledger, batch: Sequence[Submission]) -> Any:
        time.sleep(0.02)
        return commit(self, batch)

    async def record(self: Ledger, *events: Event) -> None:
        self._waiting.put(Submission(events, asyncio.get_running_loop().create_future()))

    Ledger.record, Ledger._commit = record, slow


KILLED_ANYWHERE = Case(
    "T1",
    "SIGKILL of the trainer at a statement of the ledger or an operation of the disk",
    "the ledger's law; nothing acknowledged is lost; digest and weights as if nothing had happened",
    anywhere,
    300,
    6,
    (
        Control("moments not restored", lambda size: anywhere(size, without_moments), 2),
        Control("acknowledged before written", lambda size: anywhere(size, hasty_ledger), 4),
    ),
)

KILLED_AFTER_STEPS = Case(
    "T18",
    f"SIGKILL after each of {STEPS} steps: grpo, ppo, grpo with refill",
    "digest and weights as if nothing had happened",
    after_every_step,
    3 * STEPS,
    3,
    (Control("data cursor not restored", lambda size: after_every_step(size, without_cursor), 1),),
)
