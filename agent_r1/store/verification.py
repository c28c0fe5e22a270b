"""Verification of a run from its files alone: every attempt is accounted for, and no file has changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent_r1.store.file_invariants import FILE_INVARIANTS, RunFiles, list_run_files
from agent_r1.store.folder import DATABASE
from agent_r1.store.invariants import INVARIANTS
from agent_r1.store.schema import TABLES, check_schema, connect_reader
from agent_r1.store.turn_invariants import invalid_turns

FATES = ("trained", "dropped", "superseded", "pending")


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The number of attempts by fate, and one line for every invariant that does not hold.

    Example:
        VerificationReport({"trained": 5120, "dropped": 0, "superseded": 256, "pending": 0}, 2, 20, 3, ())
    """

    attempts: Mapping[str, int]
    segments: int
    steps: int
    checkpoints: int
    violations: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.violations


def verify(folder: Path) -> VerificationReport:
    """Check every invariant of a run. Raises InvalidInput if there is no run, or one of another schema version."""
    path = folder / DATABASE
    try:
        with closing(connect_reader(path)) as connection:
            check_schema(connection, path)
            files = list_run_files(folder)
            connection.execute("BEGIN")  # one consistent state of a run that may still be written
            damage = tuple(_violation("database", _database_damage(connection)))
            if damage:  # further checks of a damaged database would only add noise
                return VerificationReport({}, 0, 0, 0, damage)
            return _check_invariants(connection, files)
    except sqlite3.DatabaseError as error:
        return VerificationReport({}, 0, 0, 0, (f"database: {error}",))


def _check_invariants(connection: sqlite3.Connection, files: RunFiles) -> VerificationReport:
    found: list[str] = []
    for name, sql in INVARIANTS.items():
        found += _violation(name, (row[0] for row in connection.execute(sql)))
    found += _violation("turns", invalid_turns(connection))
    for name, check in FILE_INVARIANTS.items():
        found += _violation(name, check(connection, files))
    sql = "SELECT (SELECT max(segment) FROM segments), (SELECT coalesce(max(step), 0) FROM current_metrics)"
    segments, steps = connection.execute(sql).fetchone()
    return VerificationReport(_count_fates(connection), segments, steps, len(files.checkpoints), tuple(found))


def _violation(name: str, offenders: Iterator[str]) -> Iterator[str]:
    """Yield one line if an invariant does not hold: the first offender, and the number of others."""
    found = list(offenders)
    if found:
        yield f"{name}: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def _count_fates(connection: sqlite3.Connection) -> dict[str, int]:
    sql = "SELECT coalesce(fate, 'pending'), count(*) FROM current_attempts GROUP BY 1"
    superseded = "SELECT 'superseded', count(*) FROM fates WHERE fate = 'superseded'"
    counts = dict([*connection.execute(sql), *connection.execute(superseded)])
    return {fate: counts.get(fate, 0) for fate in FATES}


def _database_damage(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the problems that make the database itself unreliable."""
    yield from (row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok")
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} refers to no row of {parent}"
    with closing(sqlite3.connect(":memory:")) as reference:
        reference.executescript(TABLES)
        found, expected = _schema_of(connection), _schema_of(reference)
    yield from (
        f"{name} is missing or differs from the schema" for name in expected if found.get(name) != expected[name]
    )
    yield from (f"{name} is not part of the schema" for name in found if name not in expected)


def _schema_of(connection: sqlite3.Connection) -> dict[str, str]:
    rows = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return dict(rows.fetchall())
