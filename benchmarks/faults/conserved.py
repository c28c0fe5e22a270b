"""What a run in asynchronous mode promises, read from its ledger by questions of its own."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from case import Outcome
from scenarios import MICRO, Scenario

from agent_r1.store import RunReader

TWICE, TOO_OLD = "trained twice", "older than"
"""What is said where that part of the promise is broken."""


class Dispatch(NamedTuple):
    """An attempt as it was started in a segment."""

    key: int
    attempt: str
    group: int
    member: int


class Met(NamedTuple):
    """What became of a dispatch, and in which segment."""

    key: int
    segment: int
    fate: str
    reason: str | None


def conserved(scenario: Scenario, folder: Path) -> Outcome:
    """What a complete run's ledger says against the promise; counted are what was superseded, and trained how old."""
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        dispatches = [
            Dispatch(*row) for row in connection.execute("SELECT id, attempt, group_serial, member FROM attempts")
        ]
        met = [Met(*row) for row in connection.execute("SELECT attempt_id, segment, fate, reason FROM fates")]
        measured = {step for (step,) in connection.execute("SELECT step FROM current_metrics WHERE exact")}
    steps = {**MICRO, **scenario.settings}["steps"]
    broken = [] if measured == {*range(1, steps + 1)} else [f"{len(measured)} of {steps} steps were taken"]
    broken += [*astray(dispatches, met), *twice(dispatches, met)]
    ages, bound = list(_ages(folder)), scenario.settings["max_staleness"]
    broken += [f"{attempt} was trained {age} steps old, {TOO_OLD} {bound}" for attempt, age in ages if age > bound]
    counts = Counter(f"trained {age} old" for _, age in ages)
    counts["superseded"] = sum(one.fate == "superseded" for one in met)
    return Outcome(0, tuple(broken), counts)


def astray(dispatches: Sequence[Dispatch], met: Sequence[Met]) -> Iterator[str]:
    """What has not exactly one fate, nor was superseded; and what was not trained, for no reason."""
    fates = defaultdict[int, list[Met]](list)
    for one in met:
        fates[one.key].append(one)
    for dispatch in dispatches:
        settled = Counter(one.fate == "superseded" for one in fates[dispatch.key])
        if settled[False] > 1 or settled[True] > 1 or not settled:
            yield f"{dispatch.attempt} has {settled[False]} fates, and was superseded {settled[True]} times"
        for one in fates[dispatch.key]:
            if one.fate != "trained" and not (one.reason or "").strip():
                yield f"{dispatch.attempt} was {one.fate} without a reason"


def twice(dispatches: Sequence[Dispatch], met: Sequence[Met]) -> Iterator[str]:
    """Places in a group that were trained more than once, as each segment saw it."""
    places: Mapping[int, Dispatch] = {dispatch.key: dispatch for dispatch in dispatches}
    for segment in sorted({one.segment for one in met}):
        known = [one for one in met if one.segment <= segment]
        gone = {one.key for one in known if one.fate == "superseded"}
        standing = [places[one.key] for one in known if one.fate == "trained" and one.key not in gone]
        for place, times in Counter((dispatch.group, dispatch.member) for dispatch in standing).items():
            if times > 1:
                yield f"{TWICE} in segment {segment}: member {place[1]} of group {place[0]}"


def _ages(folder: Path) -> Iterator[tuple[str, int]]:
    """What was trained, and how many versions its oldest token was behind."""
    with closing(RunReader(folder)) as reader:
        lived = {trajectory.attempt: trajectory for trajectory in reader.trajectories()}
        made = [(version.step, version.version) for version in reader.versions()]
        for fate in reader.fates():
            if fate.fate == "trained":
                newest = max(version for step, version in made if step < fate.step)
                oldest = min(span.version for turn in lived[fate.attempt].turns for span in turn.version_spans)
                yield str(fate.attempt), newest - oldest
