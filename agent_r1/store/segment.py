"""Lineages: a run that stopped goes on from a checkpoint, and what happened after that checkpoint stands no more."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput

SUPERSEDE = """
    INSERT INTO fates (attempt_id, lineage, fate, step, reason)
    SELECT id, :lineage, 'superseded', :step, 'the run was resumed from step ' || :step
    FROM standing_attempts LEFT JOIN outcomes ON attempt_id = id
    WHERE step > :step OR (fate IS NULL AND coalesce(newest_version NOT BETWEEN 0 AND :version, TRUE))
"""


def newest_lineage(connection: sqlite3.Connection) -> int:
    """The lineage that is being written, or was last."""
    return int(connection.execute("SELECT max(lineage) FROM lineages").fetchone()[0])


def open_lineage(connection: sqlite3.Connection, step: int, config: Mapping[str, Any]) -> int:
    """Open the next lineage, from the checkpoint of ``step`` and under ``config``, in one transaction; its number.

    Superseded are fates met after ``step``, and attempts without a fate unless they had finished under weights no
    newer than the checkpoint's: those stay pending, and can still be trained. Raises InvalidInput where no weights
    of that step stand in the ledger; step 0 is where every run can begin anew.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        lineage = _open(connection, step, json.dumps(config))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return lineage


def _open(connection: sqlite3.Connection, step: int, config: str) -> int:
    known = connection.execute("SELECT ?1 = 0 OR max(step) >= ?1 FROM standing_metrics", (step,)).fetchone()[0]
    version = connection.execute("SELECT max(version) FROM standing_versions WHERE step <= ?", (step,)).fetchone()[0]
    if not known or (version is None and step > 0):
        do = "resume from an older checkpoint, or put back the run.db that belongs to this one"
        raise InvalidInput("checkpoint", got=f"one of step {step}, to which the run never came", do=do)
    place = {"lineage": newest_lineage(connection) + 1, "step": step, "version": version or 0}
    connection.execute("INSERT INTO lineages VALUES (?, ?, ?, ?)", (place["lineage"], step, time.time(), config))
    connection.execute(SUPERSEDE, place)
    return int(place["lineage"])
