"""T1 with stale rollouts: runs are killed anywhere, and nothing is lost or trained twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conservation import TOO_OLD, TWICE, check_conservation
from fault_case import Case, Control, Outcome, Size
from kill_histories import Judge, kill_anywhere
from killed_training import without_data_position
from micro_run import Break, RunResult, intact
from scenarios import STALE, Scenario

from agent_r1.rollout.collector import StalenessController
from agent_r1.store import writer
from agent_r1.training import loop


def _judge_by_database(scenario: Scenario, result: RunResult) -> Judge:
    """Results differ from those of an uninterrupted run, but the database must be valid."""
    return partial(check_conservation, scenario)


def kill_ahead(size: Size, scenarios: Sequence[Scenario] = STALE, breaking: Break = intact) -> Outcome:
    """Kill runs with stale rollouts. Also checks that some were trained, and that some kills superseded attempts."""
    outcome = kill_anywhere(size, scenarios, _judge_by_database, breaking)
    ahead = sum(
        count for name, count in outcome.counts.items() if name.startswith("trained") and name != "trained 0 old"
    )
    missing = [] if ahead else ["no stale rollout was trained"]
    missing += [] if outcome.counts.get("superseded") else ["no kill superseded an attempt"]
    return outcome + Outcome(0, tuple(missing))


def unguarded_database() -> None:
    """Resuming restarts the data, and the database does not refuse what was already trained."""
    without_data_position()
    open_writer = writer.open_writer

    def opened(path: Path) -> sqlite3.Connection:
        connection = open_writer(path)
        connection.execute("DROP TRIGGER IF EXISTS no_restart_after_fate")
        return connection

    writer.open_writer = opened


def eager_controller() -> None:
    """Groups start two steps too early."""

    def started(*arguments: Any, max_staleness: int, **keywords: Any) -> StalenessController:
        return StalenessController(*arguments, max_staleness=max_staleness + 2, **keywords)

    loop.StalenessController = started


NO_REFILL = STALE[-1].but(**{"algorithm.max_refill_rounds": 0})
"""Without refill a group is trained exactly in the step that it was started for."""

STALE_NAMES = ", ".join(f"{scenario.name} by {scenario.settings['max_staleness']}" for scenario in STALE)

KILLED_AHEAD = Case(
    "T1 ahead",
    f"SIGKILL of a run with stale rollouts, spread in the same way: {STALE_NAMES}",
    "the invariants hold; nothing recorded is lost; one fate or superseded, with reasons; nothing trained twice in a"
    " segment, or too old; every step taken",
    kill_ahead,
    120,
    2,
    (
        Control(
            "data position not restored, no trigger in the database",
            TWICE,
            lambda size: kill_ahead(size, STALE[:1], unguarded_database),
            1,
        ),
        Control("groups start too early", TOO_OLD, lambda size: kill_ahead(size, (NO_REFILL,), eager_controller), 1),
    ),
)
