"""A world proves itself: its gold solutions earn full marks and its wrong ones do not, played in its environment."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.text import Text

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.reference_solution import ReferenceSolution, ReferenceSolutions, Responder
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.rollout.collector import Collector, Limits, Order
from agent_r1.rollout.scripted_agent import Performer
from agent_r1.training.config import CheckConfig
from agent_r1.training.null_recorder import Unrecorded, at_once
from agent_r1.training.report import Progress
from agent_r1.training.reward_totals import marks_of


@dataclass(frozen=True, slots=True)
class Trial:
    """A solution that is played, and what it should come to: ``full`` marks where it is ``gold``, none of them else.

    Example:
        Trial(task, ReferenceSolution("the answer", act), gold=True, full={"em": 1.0})
    """

    task: Task
    solution: ReferenceSolution
    gold: bool
    full: Mapping[str, float]

    def judged(self, lived: Trajectory) -> Played:
        return Played(self.task.id, self.solution.name, self.gold, self._fault(lived))

    def _fault(self, lived: Trajectory) -> str | None:
        if not lived.rewards:
            return f"it was not scored: {lived.status}, {lived.reason}"
        marks: dict[str, float | None] = dict.fromkeys(self.full, 0.0)  # of a reward for calls, where none was made
        marks.update(marks_of(lived))
        unscored = [name for name in self.full if marks[name] is None]
        if unscored:
            return f"{', '.join(unscored)} could not be scored"
        earned = [name for name, full in self.full.items() if _reaches(marks[name], full)]
        if self.gold:
            short = [f"{name} {marks[name]:g} of {full:g}" for name, full in self.full.items() if name not in earned]
            return f"gold, but earned {', '.join(short)}{self._unknown(lived)}" if short else None
        return f"wrong, but earned {', '.join(f'{name} {marks[name]:g}' for name in earned)}" if earned else None

    def _unknown(self, lived: Trajectory) -> str:
        """Names that nobody rewarded are misspelt, mostly."""
        given = marks_of(lived)
        unknown = [name for name in self.full if name not in given]
        return f" (no reward {', '.join(unknown)} was given; there are: {', '.join(given)})" if unknown else ""


def _reaches(mark: float | None, full: float) -> bool:
    return mark is not None and (mark > full or math.isclose(mark, full, abs_tol=1e-9))


@dataclass(frozen=True, slots=True)
class Played:
    """How a solution came out: ``fault`` says what is wrong with that, None where it is as it should be."""

    task: str
    solution: str
    gold: bool
    fault: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """One solution, or a task, that did not come out as it should.

    Example:
        Fault("test/7", "the answer", "gold, but earned em 0 of 1")
    """

    task: str
    solution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Count:
    """How many solutions were played, and how many came out as they should."""

    played: int
    held: int

    @classmethod
    def of(cls, played: Sequence[Played]) -> Count:
        return cls(len(played), sum(each.fault is None for each in played))


@dataclass(frozen=True, slots=True)
class Checked:
    """What checking a world came to."""

    world: str
    tasks: Mapping[str, int]
    gold: Count
    wrong: Count
    faults: tuple[Fault, ...]

    @property
    def holds(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """The JSON of ``check``."""
        return {"holds": self.holds, **asdict(self)}


SHOWN = 20
"""At most so many faults are listed on a terminal; the JSON has all."""


def render_checked(checked: Checked) -> Text:
    """The counts for a terminal, and the faults."""
    counts = ", ".join(f"{split} {count}" for split, count in checked.tasks.items())
    lines = [
        f"{checked.world}: {sum(checked.tasks.values())} tasks ({counts})",
        f"gold solutions with full marks: {checked.gold.held} of {checked.gold.played}",
        f"wrong solutions without: {checked.wrong.held} of {checked.wrong.played}",
        *(f"{fault.task}, {fault.solution}: {fault.reason}" for fault in checked.faults[:SHOWN]),
        *([f"and {len(checked.faults) - SHOWN} more"] if len(checked.faults) > SHOWN else []),
    ]
    return Text("\n".join(lines))


def check(config: CheckConfig, world: TaskSet, progress: Progress) -> Checked:
    """Play the solutions of ``config.n`` tasks of every split.

    Raises InvalidInput where the world brings no solutions, or those of a task cannot be made.
    """
    return asyncio.run(_check(config, world, progress))


async def _check(config: CheckConfig, world: TaskSet, progress: Progress) -> Checked:
    counts: dict[str, int] = {}
    faults: list[Fault] = []
    played: list[Played] = []
    for split in splits_of(world):
        tasks = _drawn(world.tasks(split), config.n, f"{config.seed}/{split}")
        trials = [_trials(world, task) for task in tasks]
        progress.say(f"{split}: {sum(map(len, trials))} solutions of {len(tasks)} tasks")
        counts[split] = len(tasks)
        faults += [fault for task, own in zip(tasks, trials, strict=True) for fault in _lacks(task, own)]
        played += await _play(list(chain(*trials)), world, world.env_for_split(split), config)
    faults += [Fault(each.task, each.solution, each.fault) for each in played if each.fault is not None]
    gold, wrong = (Count.of([each for each in played if each.gold is kind]) for kind in (True, False))
    return Checked(world.name, counts, gold, wrong, tuple(faults))


def splits_of(world: TaskSet) -> tuple[str, ...]:
    """Every split that a world names and has tasks in; the one of all tasks where there is one."""
    if world.whole is not None:
        return (world.whole,)
    named = ("train", world.validation, *world.evaluation, *world.variants)
    return tuple(dict.fromkeys(split for split in named if split is not None and _has(world, split)))


def _has(world: TaskSet, split: str) -> bool:
    try:
        return bool(world.tasks(split))
    except InvalidInput:  # a world that is only tested has nothing to train on
        return False


def _drawn(tasks: Sequence[Task], n: int, seed: str) -> list[Task]:
    """``n`` of the tasks at random, in their order; all of them where ``n`` is 0."""
    if n == 0 or n >= len(tasks):
        return list(tasks)
    return [tasks[place] for place in sorted(random.Random(seed).sample(range(len(tasks)), n))]


def _trials(world: TaskSet, task: Task) -> list[Trial]:
    if world.solutions is None:
        do = "give it some (in a FILE.py: a function solutions(task) -> ReferenceSolutions); docs/worlds.md shows how"
        raise InvalidInput(f"solutions of {world.name}", got="none", do=do)
    try:
        given = _well_formed(world.solutions(task))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"solutions of task {task.id}", got=got, do="mend the function that gives them") from error
    kinds = ((given.gold, True), (given.wrong, False))
    return [Trial(task, solution, kind, given.full) for solutions, kind in kinds for solution in solutions]


def _well_formed(given: ReferenceSolutions) -> ReferenceSolutions:
    """Raises TypeError where it is something else: solutions may come from a user."""
    if not isinstance(given, ReferenceSolutions):
        raise TypeError(f"it gave an object of type {type(given).__name__}, no ReferenceSolutions")
    for solution in (*given.gold, *given.wrong):
        if not isinstance(solution, ReferenceSolution) or not callable(solution.act):
            raise TypeError(f"{solution!r:.80} is no ReferenceSolution with a function to act by")
    if not isinstance(given.full, Mapping) or not all(isinstance(mark, int | float) for mark in given.full.values()):
        raise TypeError(f"full is {given.full!r:.80}, no numbers by the name of a reward")
    return given


def _lacks(task: Task, trials: Sequence[Trial]) -> Iterator[Fault]:
    """A task without a right solution, a wrong one, or full marks proves nothing."""
    for name, kind in (("gold", True), ("wrong", False)):
        if not any(trial.gold is kind for trial in trials):
            yield Fault(task.id, name, f"it has no {name} solution")
    if any(not trial.full for trial in trials):
        yield Fault(task.id, "full", "its solutions name no reward")


async def _play(trials: Sequence[Trial], world: TaskSet, env: Env, config: CheckConfig) -> list[Played]:
    """Every trial is a group of one."""

    def casting(attempt: AttemptId) -> Responder:
        return trials[attempt.group].solution.act

    performer = Performer(env, casting)
    limits = Limits(concurrency=config.concurrency, retries=0)
    collector = Collector(performer.agent, performer, world.scorers, Unrecorded(), "check", limits)
    orders = (Order(serial, trial.task, 1) for serial, trial in enumerate(trials))
    async with aclosing(collector.collect(orders, at_once)) as groups:
        return [trials[group.serial].judged(group.trajectories[0]) async for group in groups]
