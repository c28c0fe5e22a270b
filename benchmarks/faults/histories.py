"""Histories of runs that are killed anywhere, again as they go on, and come to their end."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from case import NOTHING, Outcome, Size
from micro import Break, Made, complete, found_broken, intact, killed_at, reference
from processes import Child
from scenarios import Scenario

HOURS = 4 * 3600.0
"""Seconds that all histories of a process may take."""

SPARE = 1
"""More histories than kills that have to happen: with other luck in group commits a run passes fewer positions."""

AGAIN = 0.3
"""How often the process that goes on is killed too."""

Judge = Callable[[Path], Outcome]
"""What is wrong with a run that came to its end, by its folder."""

Judging = Callable[[Scenario, Made], Judge]
"""The judge of runs of a scenario, of which one that nothing stopped made this."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Histories to live through: where each is killed first, of how many positions, and who judges the outcome."""

    scenario: Scenario
    judge: Judge
    positions: int
    kills: Sequence[int]
    seed: int


def anywhere(size: Size, scenarios: Sequence[Scenario], judging: Judging, breaking: Break = intact) -> Outcome:
    """Kill runs at positions that are spread evenly over all that a run passes, and drawn at random within that."""
    share = -(-size.injections // len(scenarios)) + SPARE
    return sum((_spread(scenario, share, size, judging, breaking) for scenario in scenarios), NOTHING)


def _spread(scenario: Scenario, share: int, size: Size, judging: Judging, breaking: Break) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        made, positions = reference(Path(place) / "run", scenario)
        drawn, judge = random.Random(f"{size.seed} {scenario.name}"), judging(scenario, made)
        kills = [1 + int((number + drawn.random()) / share * positions) for number in range(share)]
        plans = [Plan(scenario, judge, positions, kills[job :: size.jobs], size.seed) for job in range(size.jobs)]
        children = [Child(_live, plan, Path(place) / str(job), breaking) for job, plan in enumerate(plans)]
        return sum((outcome_of(child) for child in children), NOTHING)


def outcome_of(child: Child) -> Outcome:
    """What a process that lived through histories found."""
    ended = child.wait(HOURS)
    return ended.value if ended.error is None else Outcome(0, (ended.error,))


def _live(plan: Plan, place: Path, breaking: Break) -> Outcome:
    place.mkdir()
    return sum((_history(kill, plan, place, breaking) for kill in plan.kills), NOTHING)


def _history(kill: int, plan: Plan, place: Path, breaking: Break) -> Outcome:
    """One run that is killed, perhaps again as it goes on, and then judged."""
    folder, log = place / "run", place / "log"
    drawn = random.Random(f"{plan.seed} {kill}")
    fired, position, broken = 0, kill, list[str]()
    while not complete(folder):  # the last positions are those of closing a run that is complete
        ended = killed_at(position, folder, log, plan.scenario, breaking)
        fired += ended.killed
        broken += found_broken(folder, log)
        position = drawn.randint(1, plan.positions) if drawn.random() < AGAIN else 0
        if not ended.killed and ended.error is not None:
            broken.append(ended.error)
            break
    judged = plan.judge(folder) if complete(folder) else NOTHING
    shutil.rmtree(place)
    place.mkdir()
    where = f"{plan.scenario.name} killed at {kill} of {plan.positions}"
    said = tuple(f"{where}: {line}" for line in (*broken, *judged.broken))
    return Outcome(fired, said, {plan.scenario.name: fired, **judged.counts})
