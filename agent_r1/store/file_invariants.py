"""Whether what a run saved beside its ledger is whole, and is what the ledger says."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.store.folder import CONFIGURATION
from agent_r1.store.invariants import COMPLETED
from agent_r1.store.manifest import MODEL, Damaged, Manifest, check_whole, checkpoints, step_of
from agent_r1.store.rows import SAVED


def last_step(connection: sqlite3.Connection) -> int:
    """The last step that was measured; 0 where none was."""
    return int(connection.execute("SELECT coalesce(max(step), 0) FROM standing_metrics").fetchone()[0])


def last_saved(connection: sqlite3.Connection) -> int | None:
    """The step of the last checkpoint that is known to have been saved and still counts; None where none is."""
    sql = f"""SELECT max(CAST(detail AS INTEGER)) FROM events JOIN ends USING (lineage)
              WHERE kind = '{SAVED}' AND CAST(detail AS INTEGER) <= last_step"""
    found = connection.execute(sql).fetchone()[0]
    return None if found is None else int(found)


def check_checkpoint(connection: sqlite3.Connection, checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint that is whole and holds the weights that the ledger has for its step.

    Raises Damaged where it is not, InvalidInput where a newer agent-r1 wrote it.
    """
    manifest, step, last = check_whole(checkpoint), step_of(checkpoint), last_step(connection)
    if step > last:
        raise Damaged(f"{checkpoint} is of a step after the last that was measured, {last}")
    sql = "SELECT digest FROM standing_versions WHERE step <= ? ORDER BY version DESC LIMIT 1"
    made = connection.execute(sql, (step,)).fetchone()
    if made is None or made[0] != manifest.identity.weights:
        raise Damaged(f"{checkpoint} holds other weights than those of step {step}")
    return manifest


@dataclass(frozen=True, slots=True)
class Files:
    """What was in a run's folder before its ledger was looked at, so that the ledger knows of each: checkpoints, and
    the model, by the number of its folder, which is another once it is replaced."""

    folder: Path
    checkpoints: Sequence[Path]
    model: int | None


def files_of(folder: Path) -> Files:
    """What is there now."""
    return Files(folder, checkpoints(folder), _number(folder / MODEL))


def _number(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def broken_checkpoints(connection: sqlite3.Connection, files: Files) -> Iterator[str]:
    """Every checkpoint that is damaged, or whose weights are not those the ledger has for its step.

    One that is gone by then was removed by the run, which goes on.
    """
    for checkpoint in reversed(files.checkpoints):
        try:
            check_checkpoint(connection, checkpoint)
        except AgentR1Error as error:
            if checkpoint.exists():
                yield str(error)


def lost_checkpoints(connection: sqlite3.Connection, files: Files) -> Iterator[str]:
    """The newest checkpoint that was saved, where it is gone: of a run that completed, only without its model."""
    newest, there = last_saved(connection), checkpoints(files.folder)
    needed = not (_completed(connection) and (files.folder / MODEL).exists())
    if needed and newest is not None and (not there or step_of(there[0]) < newest):
        yield f"that of step {newest}, which was saved, is gone"


def broken_model(connection: sqlite3.Connection, files: Files) -> Iterator[str]:
    """The final model, where it is damaged or holds weights that the run never made.

    Until the run is complete it may be the model of an earlier end, whose weights count no more. One that is replaced
    meanwhile is not judged: the run goes on.
    """
    if files.model is None:
        return
    wrong = _wrong_with(connection, files.folder / MODEL)
    if wrong is not None and _number(files.folder / MODEL) == files.model:
        yield wrong


def _wrong_with(connection: sqlite3.Connection, model: Path) -> str | None:
    try:
        weights = check_whole(model).identity.weights
    except AgentR1Error as error:
        return str(error)
    made = "standing_versions" if _completed(connection) else "versions"
    known = connection.execute(f"SELECT 1 FROM {made} WHERE digest = ?", (weights,)).fetchone()
    return None if known else f"{model} holds weights that this run never made"


def other_configuration(connection: sqlite3.Connection, files: Files) -> Iterator[str]:
    """The configuration's file, where it says anything else than what the ledger's first lineage ran under."""
    file = files.folder / CONFIGURATION
    kept = json.loads(connection.execute("SELECT config FROM lineages ORDER BY lineage LIMIT 1").fetchone()[0])
    try:
        if json.loads(file.read_text(encoding="utf-8")) != kept:
            yield f"{file} differs from the ledger's"
    except (OSError, ValueError) as error:
        yield f"{file} cannot be read: {error}"


def _completed(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute(f"SELECT {COMPLETED}").fetchone()[0])
