"""Check a task set: gold (right) solutions must earn the expected rewards, and wrong solutions must not."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.text import Text

from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.training.metrics import RewardTotals, sum_rewards
from agent_r1.training.progress import Progress


@dataclass(frozen=True, slots=True)
class SolutionCheck:
    """A reference solution. A gold (right) one must earn all ``expected_rewards``, a wrong one none."""

    task: Task
    solution: ReferenceSolution
    is_gold: bool
    expected_rewards: Mapping[str, float]

    def failure(self, trajectory: Trajectory) -> str | None:
        """Return why the episode that the solution played fails the check; None if it passes."""
        if not trajectory.rewards:
            return f"it was not scored: {trajectory.status}, {trajectory.reason}"
        earned = sum_rewards(trajectory)
        # A reward for calls is absent if no call was made.
        totals: dict[str, float | None] = {**dict.fromkeys(self.expected_rewards, 0.0), **earned}
        unscored = [name for name in self.expected_rewards if totals[name] is None]
        if unscored:
            return f"{', '.join(unscored)} could not be scored"
        reached = [name for name, expected in self.expected_rewards.items() if _reaches(totals[name], expected)]
        if not self.is_gold:
            return f"wrong, but earned {', '.join(f'{name} {totals[name]:g}' for name in reached)}" if reached else None
        short = [
            f"{name} {totals[name]:g} of {expected:g}"
            for name, expected in self.expected_rewards.items()
            if name not in reached
        ]
        # If an expected reward is not given at all, its name in expected_rewards is probably wrong.
        unknown = [name for name in self.expected_rewards if name not in earned]
        hint = f" (no reward {', '.join(unknown)} was given; there are: {', '.join(earned)})" if unknown else ""
        return f"gold, but earned {', '.join(short)}{hint}" if short else None


def _reaches(total: float | None, expected: float) -> bool:
    return total is not None and (total > expected or math.isclose(total, expected, abs_tol=1e-9))


def reaches(totals: RewardTotals, expected: Mapping[str, float]) -> bool:
    """Return whether an attempt with these totals of its rewards is a success: each reaches what is expected."""
    return all(_reaches(totals.get(name), least) for name, least in expected.items())


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """A problem that ``agent-r1 check`` found in a task or in one of its reference solutions."""

    task: str  # the id of the task
    # the name of the reference solution. If the task lacks something, ``solution`` names the missing thing: "gold",
    # "wrong" or "expected_rewards"
    solution: str
    # a text about the problem. For example, "gold, but earned em 0 of 1" means that the reward ``em`` of the gold
    # solution was 0, but 1 was expected
    reason: str


@dataclass(frozen=True, slots=True)
class SolutionCount:
    """The number of reference solutions that were played, and how many of them passed the check."""

    played: int
    passed: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of checking a task set. ``tasks`` is the number of checked tasks by split."""

    taskset: str
    tasks: Mapping[str, int]
    gold: SolutionCount
    wrong: SolutionCount
    failures: tuple[CheckFailure, ...]
    unchecked: tuple[str, ...] = ()  # the parts of a mixture that have no reference solutions

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``agent-r1 check``: ``passed``, and one key per attribute."""
        return {"passed": self.passed, **asdict(self)}


MAX_FAILURES_SHOWN = 20

CONCURRENCY = 32


def render_report(report: CheckReport) -> Text:
    counts = ", ".join(f"{split} {count}" for split, count in report.tasks.items())
    failures, more = report.failures[:MAX_FAILURES_SHOWN], len(report.failures) - MAX_FAILURES_SHOWN
    lines = [
        f"{report.taskset}: {sum(report.tasks.values())} tasks ({counts})",
        f"gold solutions that earned the expected rewards: {report.gold.passed} of {report.gold.played}",
        f"wrong solutions that did not: {report.wrong.passed} of {report.wrong.played}",
        *([f"not checked, because they have no solutions: {', '.join(report.unchecked)}"] * bool(report.unchecked)),
        *(f"{failure.task}, {failure.solution}: {failure.reason}" for failure in failures),
        *([f"and {more} more"] if more > 0 else []),
    ]
    return Text("\n".join(lines))


def check(taskset: TaskSet, progress: Progress, *, n: int = 50, seed: int = 0) -> CheckReport:
    """Play the reference solutions of ``n`` tasks per split, and compare earned and expected rewards."""
    return asyncio.run(_check(taskset, progress, n, seed))


async def _check(taskset: TaskSet, progress: Progress, n: int, seed: int) -> CheckReport:
    if taskset.solutions is None:
        do = "add some (in a FILE.py: a function solutions(task) -> ReferenceSolutions), see docs/environments.md"
        raise InvalidInput(f"solutions of {taskset.name}", got="none", do=do)
    counts: dict[str, int] = {}
    failures: list[CheckFailure] = []
    played: list[tuple[SolutionCheck, str | None]] = []
    for split in splits_to_check(taskset):
        tasks = [task for task in taskset.tasks(split) if task.env not in taskset.unsolved]
        if not tasks:
            continue
        tasks = _sample(tasks, n, f"{seed}/{split}")
        checks = [_solution_checks(taskset.solutions, task) for task in tasks]
        progress.print_line(f"{split}: {sum(map(len, checks))} solutions of {len(tasks)} tasks")
        counts[split] = len(tasks)
        failures += [failure for task, own in zip(tasks, checks, strict=True) for failure in _missing(task, own)]
        every = list(chain(*checks))
        trajectories = await _play(every, taskset, taskset.env_for_split(split))
        played += [(one, one.failure(trajectory)) for one, trajectory in zip(every, trajectories, strict=True)]
    failures += [CheckFailure(item.task.id, item.solution.name, why) for item, why in played if why is not None]
    gold, wrong = ([why for item, why in played if item.is_gold is kind] for kind in (True, False))
    counted = [SolutionCount(len(kind), kind.count(None)) for kind in (gold, wrong)]
    return CheckReport(taskset.name, counts, counted[0], counted[1], tuple(failures), taskset.unsolved)


def splits_to_check(taskset: TaskSet) -> tuple[str, ...]:
    """Return all splits that have tasks, or only ``taskset.whole`` if it is given."""
    if taskset.whole is not None:
        return (taskset.whole,)
    splits = ("train", taskset.validation, *taskset.evaluation, *taskset.variants)
    return tuple(dict.fromkeys(split for split in splits if split is not None and _has_tasks(taskset, split)))


def _has_tasks(taskset: TaskSet, split: str) -> bool:
    try:
        return bool(taskset.tasks(split))
    except InvalidInput:  # a task set can have evaluation splits only
        return False


def _sample(tasks: Sequence[Task], n: int, seed: str) -> list[Task]:
    if n == 0 or n >= len(tasks):
        return list(tasks)
    return [tasks[index] for index in sorted(random.Random(seed).sample(range(len(tasks)), n))]


def _solution_checks(solutions: Callable[[Task], ReferenceSolutions], task: Task) -> list[SolutionCheck]:
    try:
        given = _validate(solutions(task))
    except InvalidInput:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"solutions of task {task.id}", got=got, do="fix the function that returns them") from error
    kinds = ((given.gold, True), (given.wrong, False))
    return [
        SolutionCheck(task, solution, is_gold, given.expected_rewards)
        for solutions, is_gold in kinds
        for solution in solutions
    ]


def _validate(given: ReferenceSolutions) -> ReferenceSolutions:
    if not isinstance(given, ReferenceSolutions):
        raise TypeError(f"it returned an object of type {type(given).__name__}, not ReferenceSolutions")
    for solution in (*given.gold, *given.wrong):
        if not isinstance(solution, ReferenceSolution) or not callable(solution.respond):
            raise TypeError(f"{solution!r:.80} is not a ReferenceSolution with a function")
    rewards = given.expected_rewards
    if not isinstance(rewards, Mapping) or not all(isinstance(value, int | float) for value in rewards.values()):
        raise TypeError(f"expected_rewards is {rewards!r:.80}, not numbers by the name of a reward")
    return given


def _missing(task: Task, checks: Sequence[SolutionCheck]) -> Iterator[CheckFailure]:
    for name, is_gold in (("gold", True), ("wrong", False)):
        if not any(check.is_gold is is_gold for check in checks):
            yield CheckFailure(task.id, name, f"it has no {name} solution")
    if any(not check.expected_rewards for check in checks):
        yield CheckFailure(task.id, "expected_rewards", "its solutions name no reward")


async def play_solutions(taskset: TaskSet, split: str, tasks: Sequence[Task]) -> list[Trajectory]:
    """Play the first gold solution of each task. Raise InvalidInput if a solution does not earn what it should."""
    assert taskset.solutions is not None
    env, solutions = taskset.env_for_split(split), taskset.solutions
    checks = [check for task in tasks for check in _solution_checks(solutions, task)[:1] if check.is_gold]
    played = await _play(checks, taskset, env)
    for check, trajectory in zip(checks, played, strict=True):
        if why := check.failure(trajectory):
            do = "look at it with 'agent-r1 check'"
            raise InvalidInput(f"solution of task {check.task.id}", got=why, do=do)
    return played


async def _play(checks: Sequence[SolutionCheck], taskset: TaskSet, env: Env) -> list[Trajectory]:
    agent = ScriptedAgent(env, lambda attempt: checks[attempt.group_id].solution.respond)
    limits = RolloutLimits(concurrency=CONCURRENCY, retries=0)
    collector = Collector(agent, taskset.scorers, NullRecorder(), "check", limits)
    requests = (GroupRequest(index, check.task, 1) for index, check in enumerate(checks))
    async with aclosing(collector.collect(requests)) as groups:
        return [group.trajectories[0] async for group in groups]
