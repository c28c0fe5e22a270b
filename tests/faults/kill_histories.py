"""Histories of runs that are killed anywhere, perhaps again after resuming, and then finish."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_case import NOTHING, Outcome, Size
from micro_run import Break, RunResult, find_violations, intact, is_complete, run_reference, run_until_killed
from processes import Child
from scenarios import Scenario

MAX_SECONDS = 4 * 3600.0
"""Time limit for all histories of one process."""

SPARE = 1
"""Additional histories: group commits vary, so a run may finish before it reaches its position."""

KILL_AGAIN = 0.3
"""Probability that a resumed process is killed too."""

Judge = Callable[[Path], Outcome]
"""Returns the violations in the folder of a finished run."""

MakeJudge = Callable[[Scenario, RunResult], Judge]
"""Returns the judge for runs of a scenario, given the result of an uninterrupted one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The histories of one process: the positions of the first kills, and the judge of the results."""

    scenario: Scenario
    judge: Judge
    positions: int
    kills: Sequence[int]
    seed: int


def kill_anywhere(
    size: Size, scenarios: Sequence[Scenario], make_judge: MakeJudge, breaking: Break = intact
) -> Outcome:
    """Kill runs at random positions that are spread evenly over the whole run."""
    scenarios = scenarios[: size.injections]
    share = -(-size.injections // len(scenarios)) + SPARE
    return sum((_kill_evenly(scenario, share, size, make_judge, breaking) for scenario in scenarios), NOTHING)


def _kill_evenly(scenario: Scenario, share: int, size: Size, make_judge: MakeJudge, breaking: Break) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        result, positions = run_reference(Path(place) / "run", scenario)
        drawn, judge = random.Random(f"{size.seed} {scenario.name}"), make_judge(scenario, result)
        kills = [1 + int((number + drawn.random()) / share * positions) for number in range(share)]
        plans = [Plan(scenario, judge, positions, kills[job :: size.jobs], size.seed) for job in range(size.jobs)]
        children = [Child(_run_plan, plan, Path(place) / str(job), breaking) for job, plan in enumerate(plans)]
        return sum((outcome_of(child) for child in children), NOTHING)


def outcome_of(child: Child) -> Outcome:
    """Wait for a process, and return its outcome."""
    ended = child.wait(MAX_SECONDS)
    return ended.value if ended.error is None else Outcome(0, (ended.error,))


def _run_plan(plan: Plan, place: Path, breaking: Break) -> Outcome:
    place.mkdir()
    return sum((_run_history(kill, plan, place, breaking) for kill in plan.kills), NOTHING)


def _run_history(kill: int, plan: Plan, place: Path, breaking: Break) -> Outcome:
    """Kill one run, perhaps again after resuming, let it finish, and judge the result."""
    folder, log = place / "run", place / "log"
    drawn = random.Random(f"{plan.seed} {kill}")
    fired, position, broken = 0, kill, list[str]()
    while not is_complete(folder):  # the last positions are in the closing of a complete run
        ended = run_until_killed(position, folder, log, plan.scenario, breaking)
        fired += ended.killed
        broken += find_violations(folder, log)
        position = drawn.randint(1, plan.positions) if drawn.random() < KILL_AGAIN else 0
        if not ended.killed and ended.error is not None:
            broken.append(ended.error)
            break
    judged = plan.judge(folder) if is_complete(folder) else NOTHING
    shutil.rmtree(place)
    place.mkdir()
    where = f"{plan.scenario.name} killed at {kill} of {plan.positions}"
    lines = tuple(f"{where}: {line}" for line in (*broken, *judged.violations))
    return Outcome(fired, lines, {plan.scenario.name: fired, **judged.counts})
