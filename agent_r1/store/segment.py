"""Segments of a run. A segment is a stretch of training without a stop.

If a run is resumed from a checkpoint, a new segment begins. The old records of the steps after the checkpoint are
superseded, which means that they no longer count.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.store.ledger import Ledger

SUPERSEDED = """
    SELECT current_attempts.id, :segment, 'superseded', :step, 'the run was resumed from step ' || :step, NULL
    FROM current_attempts LEFT JOIN outcomes ON attempt_id = current_attempts.id
    WHERE step > :step OR (fate IS NULL AND coalesce(newest_version NOT BETWEEN 0 AND :version, TRUE))
    ORDER BY current_attempts.id
"""


def latest_segment(connection: sqlite3.Connection) -> int:
    """Return the number of the last segment (a stretch of training without a stop), counted from 1."""
    return int(connection.execute("SELECT max(segment) FROM segments").fetchone()[0])


def read_reward_weights(connection: sqlite3.Connection) -> Mapping[str, float]:
    """Return the weights of rewards by name; {} if no weight is set."""
    config = connection.execute("SELECT config FROM segments ORDER BY segment DESC LIMIT 1").fetchone()[0]
    weights: Mapping[str, float] = json.loads(config).get("reward_weights", {})
    return weights


def open_segment(connection: sqlite3.Connection, ledger: Ledger, step: int, config: Mapping[str, Any]) -> int:
    """Open a new segment from the checkpoint of ``step``, in one transaction. Return the number of the segment.

    Raises:
        InvalidInput: the run did not reach ``step``, or has no weights of this or an earlier step. Step 0 is always
            valid.
    """
    with ledger.transaction():
        known = connection.execute("SELECT ?1 = 0 OR max(step) >= ?1 FROM current_metrics", (step,)).fetchone()[0]
        sql = "SELECT max(version) FROM current_versions WHERE step <= ?"
        version = connection.execute(sql, (step,)).fetchone()[0]
        if not known or (version is None and step > 0):
            do = "resume from an older checkpoint, or put back the run.db that belongs to this one"
            raise InvalidInput("checkpoint", got=f"one of step {step}, which the run never reached", do=do)
        segment = latest_segment(connection) + 1
        ledger.append("segments", [(segment, step, time.time(), json.dumps(config))])
        superseded = {"segment": segment, "step": step, "version": version or 0}
        ledger.append("fates", connection.execute(SUPERSEDED, superseded).fetchall())
    return segment
