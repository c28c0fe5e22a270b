"""Verification of a run from its files alone: the records are consistent, and no file has changed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.store.folder import DATABASE
from agent_r1.store.invariants import FILE_INVARIANTS, INVARIANTS, RunFiles, invalid_attempts, list_run_files
from agent_r1.store.manifest import DIGEST_FILE, MODEL, RowsDigest, digest_rows, read_manifest
from agent_r1.store.reader import RunReader
from agent_r1.store.rows import encode_version_spans
from agent_r1.store.schema import TABLES, check_schema, connect_reader

FATES = ("trained", "dropped", "superseded", "pending")


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of verifying a run. If the database cannot be read, there are only violations."""

    # four numbers of attempts, with the keys "trained", "dropped", "superseded" and "pending". A superseded attempt
    # became invalid when the run was resumed. A pending attempt is neither trained nor dropped yet
    attempts: Mapping[str, int]
    segments: int
    steps: int
    checkpoints: int
    rows: int  # the number of rows in the database
    # the number of newest rows that no digest covers, neither ``digest.json`` nor that of a checkpoint or model. If
    # there are violations, this number is 0
    not_closed: int
    rows_sha256: str  # the sha256 of all rows of the database
    violations: tuple[str, ...]  # one line for each invariant that does not hold
    warnings: tuple[str, ...]  # one line if the run is complete, but ``not_closed`` is not 0

    @property
    def is_valid(self) -> bool:
        return not self.violations


def verify(folder: Path) -> VerificationReport:
    """Check every invariant of a run. If the database is damaged, report only the damage.

    Raises InvalidInput if ``folder`` holds no run, or a run whose schema version is not ``SCHEMA_VERSION``.
    """
    path = folder / DATABASE
    with closing(connect_reader(path)) as connection:
        connection.text_factory = _decode_text
        try:
            check_schema(connection, path)
            files = list_run_files(folder)
            connection.execute("BEGIN")  # read one consistent state, even if the run is being written
            damage = [*_violation("schema", changed_schema(connection))]
            damage = damage or [*_violation("database", damaged_pages(connection))]
        except _UNREADABLE as error:
            damage = [f"database: {error}"]
        if damage:  # further checks would report consequences of the damage
            return VerificationReport({}, 0, 0, 0, 0, 0, "", tuple(damage), ())
        return _check_invariants(connection, files)


_UNREADABLE = (sqlite3.Error, ValueError)
"""The errors of reading a damaged database. ValueError: a text is no JSON, or has bytes that are not UTF-8."""


def _decode_text(text: bytes) -> str:
    # Bytes that are not UTF-8 become lone surrogates, so damaged text never equals valid text.
    return text.decode("utf-8", "surrogateescape")


def _check_invariants(connection: sqlite3.Connection, files: RunFiles) -> VerificationReport:
    reader = RunReader(files.folder, connection)
    found: list[str] = []
    for name, check in FILE_INVARIANTS.items():
        found += _violation(name, check(connection, reader, files))
    for name, sql in INVARIANTS.items():
        found += _violation(name, (row[0] for row in connection.execute(sql)))
    found += _violation("turns", invalid_attempts(connection, reader))
    sql = "SELECT (SELECT max(segment) FROM segments), (SELECT coalesce(max(step), 0) FROM current_metrics)"
    segments, steps = connection.execute(sql).fetchone()
    rows = digest_rows(connection)
    not_closed = 0
    warnings: tuple[str, ...] = ()
    if not found and (not_closed := rows.rows - _closed_rows(files)) and reader.is_complete():
        # Only a warning: a run that is killed at its very end has no digest file.
        lines = f"the run is complete, and no digest covers its last {not_closed} rows: a change would not be noticed"
        warnings = (f"{files.folder / DIGEST_FILE} is missing: {lines}",)
    fates, checkpoints = _count_fates(connection), len(files.checkpoints)
    counts = (segments, steps, checkpoints, rows.rows, not_closed)
    return VerificationReport(fates, *counts, rows.sha256, tuple(found), warnings)


def _closed_rows(files: RunFiles) -> int:
    folders = [*files.checkpoints, *([] if files.model is None else [files.folder / MODEL])]
    digests = [read_manifest(folder).rows for folder in folders if folder.exists()]
    digests += [] if files.closed is None else [RowsDigest.from_json(json.loads(files.closed))]
    return max((digest.rows for digest in digests if digest is not None), default=0)


def _violation(name: str, offenders: Iterable[str]) -> Iterator[str]:
    found: list[str] = []
    try:
        found.extend(offenders)
    except _UNREADABLE as error:
        found.append(str(error))
    if found:
        yield f"{name}: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def _count_fates(connection: sqlite3.Connection) -> dict[str, int]:
    sql = "SELECT coalesce(fate, 'pending'), count(*) FROM current_attempts GROUP BY 1"
    superseded = "SELECT 'superseded', count(*) FROM fates WHERE fate = 'superseded'"
    counts = dict([*connection.execute(sql), *connection.execute(superseded)])
    return {fate: counts.get(fate, 0) for fate in FATES}


def changed_schema(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield one line for each table, index, view or trigger that is missing, additional or changed."""
    with closing(sqlite3.connect(":memory:")) as reference:
        reference.executescript(TABLES)
        found, expected = _schema_of(connection), _schema_of(reference)
    for kind, name, *_ in sorted(expected - found, key=str):
        yield f"{kind} {name} is missing or differs from the schema"
    for kind, name, *_ in sorted(found - expected, key=str):
        yield f"{kind!r} {name!r} is not part of the schema"


def _schema_of(connection: sqlite3.Connection) -> Set[tuple[Any, ...]]:
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


def damaged_pages(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield one line for each problem that SQLite finds in the file, and for each row that refers to a missing row."""
    yield from (row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok")
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} refers to no row of {parent}"


def run_digest(reader: RunReader) -> str:
    """Return the sha256 of everything that an exact repetition of the run reproduces.

    If training is deterministic, a run that was stopped and resumed has the same digest as a run without a stop.
    """
    total = hashlib.sha256()
    ignored = frozenset(name for name, weight in reader.config().get("reward_weights", {}).items() if weight == 0)
    for entry in _entries(reader, ignored):
        # repr of a float64 is exact; one entry per line is unambiguous, because JSON text has no raw newline
        total.update(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")
    return total.hexdigest()


def _entries(reader: RunReader, ignored: Set[str]) -> Iterator[list[Any]]:
    ignored_means = {f"reward/{name}" for name in ignored}
    fates = {fate.attempt: [fate.fate, fate.step, fate.credit] for fate in reader.fates()}
    for event in sorted(reader.attempts(), key=lambda event: (event.attempt.sort_key, event.attempt.task)):
        attempt = event.attempt
        yield ["attempt", attempt.task, attempt.sort_key, event.split, event.version, fates.get(attempt)]
        trajectory = reader.trajectory(attempt)
        if trajectory is not None:
            yield from _trajectory_entries(trajectory, ignored)
    for version in reader.versions():
        yield ["version", version.number, version.step, version.checksum]
    for step in reader.reproducible_metrics():
        yield ["metrics", step.step, {key: step.values[key] for key in step.values if key not in ignored_means}]


def _trajectory_entries(trajectory: Trajectory, ignored: Set[str]) -> Iterator[list[Any]]:
    rewards = _without(trajectory.rewards, ignored)
    answer = [] if trajectory.answer is None else [trajectory.answer]
    yield ["outcome", trajectory.task_id, trajectory.status, trajectory.truncated, rewards, *answer]
    yield from (["turn", *_turn_fields(turn, ignored)] for turn in trajectory.turns)


def _turn_fields(turn: Turn, ignored: Set[str]) -> Iterator[Any]:
    yield from (turn.index, turn.parent, turn.kind, turn.finish_reason)
    yield from (turn.new_ids, turn.action_ids, turn.logprobs, encode_version_spans(turn.version_spans))
    if turn.media:  # the placeholder tokens of two images can be equal
        yield [media.image.sha256 for media in turn.media]
    yield _without(turn.rewards, ignored)
    for end, rewards in zip(turn.call_ends, turn.call_rewards, strict=False):
        if counted := _without(rewards, ignored):
            yield [end, counted]


def _without(rewards: Rewards, ignored: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in rewards.items() if name not in ignored}
