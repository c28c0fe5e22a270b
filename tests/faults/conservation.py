"""The promises of a run with stale rollouts, checked with queries that are independent of the package."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from fault_case import Outcome
from scenarios import MICRO, Scenario

from agent_r1.store.reader import RunReader

TWICE, TOO_OLD = "trained twice", "older than"
"""Words in the violations of the two promises."""


class Start(NamedTuple):
    """An attempt that was started in a segment."""

    key: int
    attempt: str
    group: int
    index: int


class Fate(NamedTuple):
    """The fate of a started attempt, and its segment."""

    key: int
    segment: int
    fate: str
    reason: str | None


def check_conservation(scenario: Scenario, folder: Path) -> Outcome:
    """Return the violations in a complete run, and counts of superseded attempts and of trained ones by staleness."""
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        starts = [Start(*row) for row in connection.execute("SELECT id, attempt, group_id, sample_index FROM attempts")]
        fates = [Fate(*row) for row in connection.execute("SELECT attempt_id, segment, fate, reason FROM fates")]
        steps_with_metrics = {
            step for (step,) in connection.execute("SELECT step FROM current_metrics WHERE reproducible")
        }
    steps = {**MICRO, **scenario.settings}["steps"]
    broken = (
        []
        if steps_with_metrics == {*range(1, steps + 1)}
        else [f"{len(steps_with_metrics)} of {steps} steps were taken"]
    )
    broken += [*find_wrong_fates(starts, fates), *find_trained_twice(starts, fates)]
    ages, bound = list(_ages(folder)), scenario.settings["max_staleness"]
    broken += [f"{attempt} was trained {age} steps old, {TOO_OLD} {bound}" for attempt, age in ages if age > bound]
    counts = Counter(f"trained {age} old" for _, age in ages)
    counts["superseded"] = sum(one.fate == "superseded" for one in fates)
    return Outcome(0, tuple(broken), counts)


def find_wrong_fates(starts: Sequence[Start], fates: Sequence[Fate]) -> Iterator[str]:
    """Yield attempts without exactly one fate (or supersession), and untrained ones without a reason."""
    by_start = defaultdict[int, list[Fate]](list)
    for fate in fates:
        by_start[fate.key].append(fate)
    for start in starts:
        settled = Counter(one.fate == "superseded" for one in by_start[start.key])
        if settled[False] > 1 or settled[True] > 1 or not settled:
            yield f"{start.attempt} has {settled[False]} fates, and was superseded {settled[True]} times"
        for one in by_start[start.key]:
            if one.fate != "trained" and not (one.reason or "").strip():
                yield f"{start.attempt} was {one.fate} without a reason"


def find_trained_twice(starts: Sequence[Start], fates: Sequence[Fate]) -> Iterator[str]:
    """Yield positions in a group that were trained more than once, as each segment saw them."""
    places: Mapping[int, Start] = {start.key: start for start in starts}
    for segment in sorted({one.segment for one in fates}):
        known = [one for one in fates if one.segment <= segment]
        superseded = {one.key for one in known if one.fate == "superseded"}
        trained = [places[one.key] for one in known if one.fate == "trained" and one.key not in superseded]
        for place, times in Counter((start.group, start.index) for start in trained).items():
            if times > 1:
                yield f"{TWICE} in segment {segment}: index {place[1]} of group {place[0]}"


def _ages(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the trained attempts, and how many versions their oldest tokens were behind."""
    with closing(RunReader(folder)) as reader:
        trajectories = {trajectory.attempt: trajectory for trajectory in reader.trajectories()}
        versions = [(version.step, version.number) for version in reader.versions()]
        for fate in reader.fates():
            if fate.fate == "trained":
                newest = max(version for step, version in versions if step < fate.step)
                oldest = min(span.version for turn in trajectories[fate.attempt].turns for span in turn.version_spans)
                yield str(fate.attempt), newest - oldest
