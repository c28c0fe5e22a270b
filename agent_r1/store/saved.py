"""Whether what a run saved beside its ledger is whole, and is what the ledger says."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.store.folder import CONFIGURATION
from agent_r1.store.manifest import MODEL, check_whole, checkpoints, step_of


def broken_checkpoints(connection: sqlite3.Connection, folder: Path) -> Iterator[str]:
    """Every checkpoint that is damaged, or whose weights are not those the ledger has for its step."""
    last = connection.execute("SELECT coalesce(max(step), 0) FROM standing_metrics").fetchone()[0]
    for checkpoint in reversed(checkpoints(folder)):
        step = step_of(checkpoint)
        sql = "SELECT digest FROM standing_versions WHERE step <= ? ORDER BY version DESC LIMIT 1"
        made = connection.execute(sql, (step,)).fetchone()
        try:
            weights = check_whole(checkpoint).identity.weights
        except AgentR1Error as error:
            yield str(error)
            continue
        if step > last:
            yield f"{checkpoint} is of a step after the last that was measured, {last}"
        elif made is None or made[0] != weights:
            yield f"{checkpoint} holds other weights than those of step {step}"


def broken_model(connection: sqlite3.Connection, folder: Path) -> Iterator[str]:
    """The final model, where it is damaged or holds weights that the run never made."""
    model = folder / MODEL
    if not model.exists():
        return
    try:
        weights = check_whole(model).identity.weights
    except AgentR1Error as error:
        yield str(error)
        return
    if connection.execute("SELECT 1 FROM standing_versions WHERE digest = ?", (weights,)).fetchone() is None:
        yield f"{model} holds weights that this run never made"


def other_configuration(connection: sqlite3.Connection, folder: Path) -> Iterator[str]:
    """The configuration's file, where it says anything else than what the ledger's first lineage ran under."""
    kept = json.loads(connection.execute("SELECT config FROM lineages ORDER BY lineage LIMIT 1").fetchone()[0])
    try:
        if json.loads((folder / CONFIGURATION).read_text(encoding="utf-8")) != kept:
            yield f"{folder / CONFIGURATION} differs from the ledger's"
    except (OSError, ValueError) as error:
        yield f"{folder / CONFIGURATION} cannot be read: {error}"
