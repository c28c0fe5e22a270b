"""T1 in asynchronous mode: runs that act ahead are killed anywhere, and nothing is lost or trained twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from case import Case, Control, Outcome, Size
from conserved import TOO_OLD, TWICE, conserved
from histories import Judge, anywhere
from killed_training import without_cursor
from micro import Break, Made, intact
from scenarios import AHEAD, Scenario

from agent_r1.rollout.staleness import StalenessController
from agent_r1.store import writer as ledger
from agent_r1.training import loop
from agent_r1.training.monitor import health_monitor as doctor


def _by_the_ledger(scenario: Scenario, made: Made) -> Judge:
    """Bits differ from those of the run that was not stopped; the ledger has to hold all the same."""
    return partial(conserved, scenario)


def killed_ahead(size: Size, scenarios: Sequence[Scenario] = AHEAD, breaking: Break = intact) -> Outcome:
    """Runs that act ahead; that they did, and that kills undid something, is asked too."""
    outcome = anywhere(size, scenarios, _by_the_ledger, breaking)
    ahead = sum(
        count for name, count in outcome.counts.items() if name.startswith("trained") and name != "trained 0 old"
    )
    idle = [] if ahead else ["nothing that was acted ahead was trained"]
    idle += [] if outcome.counts.get("superseded") else ["no kill undid anything"]
    return outcome + Outcome(0, tuple(idle))


def unguarded_ledger() -> None:
    """The data begins anew where a run goes on; neither ledger nor doctor refuse what was trained already."""
    without_cursor()
    doctor.torn = lambda group, serial, size, greedy: None
    open_writer = ledger.open_writer

    def opened(path: Path) -> sqlite3.Connection:
        connection = open_writer(path)
        connection.execute("DROP TRIGGER IF EXISTS trained_once")
        return connection

    ledger.open_writer = opened


def hasty_clock() -> None:
    """Groups start two steps earlier than they may, and the doctor does not look how old tokens are."""
    bounds = doctor.bounds

    def started(*arguments: Any, max_staleness: int, **keywords: Any) -> StalenessController:
        return StalenessController(*arguments, max_staleness=max_staleness + 2, **keywords)

    loop.StalenessController = started
    doctor.bounds = lambda config, most: bounds(config, most + 2)


NO_REFILL = AHEAD[-1].but(**{"algorithm.max_refill_rounds": 0})
"""What starts for a later step is trained in that one, and in none before."""

AHEADS = ", ".join(f"{scenario.name} by {scenario.settings['max_staleness']}" for scenario in AHEAD)

KILLED_AHEAD = Case(
    "T1 ahead",
    f"SIGKILL of a trainer that acts ahead, spread in the same way: {AHEADS}",
    "the ledger's law; nothing acknowledged is lost; one fate or superseded, with reasons; nothing trained twice in a"
    " segment, or too old; every step taken",
    killed_ahead,
    120,
    2,
    (
        Control(
            "data cursor not restored, no trigger in the ledger",
            TWICE,
            lambda size: killed_ahead(size, AHEAD[:1], unguarded_ledger),
            1,
        ),
        Control("groups start too early", TOO_OLD, lambda size: killed_ahead(size, (NO_REFILL,), hasty_clock), 1),
    ),
)
