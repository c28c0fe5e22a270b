"""Invariants of the files of a run: the files are intact and agree with the database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.store.folder import CONFIG_FILE
from agent_r1.store.invariants import COMPLETED
from agent_r1.store.ledger import SEAL_FILE, Seal, contradicts, read_head
from agent_r1.store.manifest import (
    MODEL,
    CorruptCheckpoint,
    Manifest,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from agent_r1.store.rows import CHECKPOINT_SAVED


def last_step(connection: sqlite3.Connection) -> int:
    """Return the last step with metrics, or 0."""
    return int(connection.execute("SELECT coalesce(max(step), 0) FROM current_metrics").fetchone()[0])


def last_checkpoint_step(connection: sqlite3.Connection) -> int | None:
    """Return the step of the last saved checkpoint, or None.

    A checkpoint of step 30 no longer counts after the run was resumed from step 20.
    """
    sql = f"""SELECT max(CAST(detail AS INTEGER)) FROM events JOIN segment_ends USING (segment)
              WHERE kind = '{CHECKPOINT_SAVED}' AND CAST(detail AS INTEGER) <= last_step"""
    found = connection.execute(sql).fetchone()[0]
    return None if found is None else int(found)


def check_checkpoint(connection: sqlite3.Connection, checkpoint: Path) -> Manifest:
    """Compare a checkpoint with the database of its run, and return its manifest.

    Raises:
        CorruptCheckpoint: a file is missing, additional or changed, or the checkpoint contradicts the database.
        InvalidInput: this version of agent-r1 does not read the format of the checkpoint.
    """
    manifest, step, last = check_manifest(checkpoint), checkpoint_step(checkpoint), last_step(connection)
    if step > last:
        raise CorruptCheckpoint(f"{checkpoint} is of a step after the last one with metrics, {last}")
    sql = "SELECT checksum FROM current_versions WHERE step <= ? ORDER BY version DESC LIMIT 1"
    row = connection.execute(sql, (step,)).fetchone()
    if row is None or row[0] not in (None, manifest.fingerprint.weights):  # None: no checksum was computed
        raise CorruptCheckpoint(f"{checkpoint} does not hold the weights of step {step}")
    if manifest.seal is not None and (problem := contradicts(connection, manifest.seal)) is not None:
        raise CorruptCheckpoint(f"{checkpoint} does not fit the ledger: {problem}")
    return manifest


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run.

    If a run is still training, list its files first and read its database afterwards. The database is then not older
    than the files.

    Attributes:
        checkpoints: the folders of the checkpoints, newest first.
        model: the inode of the model's folder, which changes if the model is replaced; None if there is no model.
        seal: the content of ``seal.json``, or None.
    """

    folder: Path
    checkpoints: Sequence[Path]
    model: int | None
    seal: bytes | None


def list_run_files(folder: Path) -> RunFiles:
    try:
        seal = (folder / SEAL_FILE).read_bytes()
    except FileNotFoundError:
        seal = None
    return RunFiles(folder, list_checkpoints(folder), _inode(folder / MODEL), seal)


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def invalid_checkpoints(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield one message for each checkpoint that :func:`check_checkpoint` refuses.

    Training can continue during the check and remove an old checkpoint. No message is yielded for a removed checkpoint.
    """
    for checkpoint in reversed(files.checkpoints):
        try:
            check_checkpoint(connection, checkpoint)
        except AgentR1Error as error:
            if checkpoint.exists():
                yield str(error)


def missing_checkpoints(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the newest recorded checkpoint is missing on the disk.

    A complete run with its final model needs no checkpoint.
    """
    newest, present = last_checkpoint_step(connection), list_checkpoints(files.folder)
    needed = not (_is_complete(connection) and (files.folder / MODEL).exists())
    if needed and newest is not None and (not present or checkpoint_step(present[0]) < newest):
        yield f"the checkpoint of step {newest} was saved and is gone"


def invalid_model(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the final model is corrupt, or if its weights are none of the run's recorded versions.

    A run that still trains can replace its final model during the check. Then no message is yielded.
    """
    if files.model is None:
        return
    problem = _check_model(connection, files.folder / MODEL)
    if problem is not None and _inode(files.folder / MODEL) == files.model:
        yield problem


def _check_model(connection: sqlite3.Connection, model: Path) -> str | None:
    try:
        manifest = check_manifest(model)
    except AgentR1Error as error:
        return str(error)
    if manifest.seal is not None and (problem := contradicts(connection, manifest.seal)) is not None:
        return f"{model} does not fit the ledger: {problem}"
    # A run that is not complete can have saved this model before it was resumed.
    table = "current_versions" if _is_complete(connection) else "versions"
    # Versions without a checksum cannot be compared.
    weights = manifest.fingerprint.weights
    known = connection.execute(f"SELECT 1 FROM {table} WHERE checksum = ? OR checksum IS NULL", (weights,)).fetchone()
    return None if known else f"{model} holds weights that this run never published"


def changed_config(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the configuration file cannot be read, or differs from the configuration in the database.

    The database holds the configuration with which the run was first started.
    """
    file = files.folder / CONFIG_FILE
    recorded = json.loads(connection.execute("SELECT config FROM segments ORDER BY segment LIMIT 1").fetchone()[0])
    try:
        if json.loads(file.read_text(encoding="utf-8")) != recorded:
            yield f"{file} differs from the configuration in the run's database"
    except (OSError, ValueError, RecursionError) as error:
        yield f"{file} cannot be read: {error}"


def invalid_seal(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if ``seal.json`` cannot be read, or if the database contradicts the seal in ``seal.json``.

    A seal is a hash of one row and all earlier rows.
    """
    if files.seal is None:
        return
    try:
        problem = contradicts(connection, Seal.from_json(json.loads(files.seal)))
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read: {type(error).__name__}: {error}"
    if problem is not None:
        yield f"{files.folder / SEAL_FILE} does not fit the ledger: {problem}"


def last_closed_row(files: RunFiles) -> int:
    """Return the number of the last row whose seal is in ``seal.json`` or in a manifest; 0 if there is no such seal.

    A seal is a hash of one row and all earlier rows. The manifests are the manifests of the checkpoints and of the
    model. Call this function only after all these files were checked: an unreadable file raises an exception.
    """
    folders = [*files.checkpoints, *([] if files.model is None else [files.folder / MODEL])]
    seals = [read_manifest(folder).seal for folder in folders if folder.exists()]
    seals += [] if files.seal is None else [Seal.from_json(json.loads(files.seal))]
    return max((seal.row for seal in seals if seal is not None), default=0)


def missing_seals(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a warning if the run is complete, but no file outside the database has the seal of the last row.

    The seal of a database row is a hash of this row and all earlier rows. The files that can have seals are
    ``seal.json`` and the manifests of the checkpoints and of the model.
    """
    rows = read_head(connection).row - last_closed_row(files)
    if rows and _is_complete(connection):  # only a warning: a run that is killed at its very end leaves no seal file
        yield (
            f"{files.folder / SEAL_FILE} is missing or old: the run is complete, and no seal outside of the database "
            f"covers its last {rows} rows, so a change of these rows and of all later seals would not be noticed"
        )


def _is_complete(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute(f"SELECT {COMPLETED}").fetchone()[0])


FILE_INVARIANTS: Mapping[str, Callable[[sqlite3.Connection, RunFiles], Iterator[str]]] = {
    "checkpoints": invalid_checkpoints,
    "newest checkpoint": missing_checkpoints,
    "model": invalid_model,
    "seal": invalid_seal,
    "configuration": changed_config,
}
"""A check for each invariant, by name. A check yields one line of text for each violation."""
