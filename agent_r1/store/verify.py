"""Proving a run from its files alone: everything that was started is accounted for, and nothing changed since."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent_r1.store.file_invariants import (
    Files,
    broken_checkpoints,
    broken_model,
    files_of,
    lost_checkpoints,
    other_configuration,
)
from agent_r1.store.folder import DATABASE
from agent_r1.store.invariants import LAW
from agent_r1.store.schema import TABLES, check_schema, connect_reader
from agent_r1.store.turn_invariants import broken_turns

FATES = ("trained", "dropped", "superseded", "pending")

FileRule = Callable[[sqlite3.Connection, Files], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run's dispatched attempts, by fate, and every rule that does not hold, in a line each.

    Example:
        Verdict({"trained": 5120, "dropped": 0, "superseded": 256, "pending": 0}, 2, 20, 3, ())
    """

    attempts: Mapping[str, int]
    lineages: int
    steps: int
    checkpoints: int
    violations: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.violations


def verify(folder: Path) -> Verdict:
    """Check every rule. Raises InvalidInput where there is no run, or one of another schema."""
    path = folder / DATABASE
    try:
        with closing(connect_reader(path)) as connection:
            check_schema(connection, path)
            files = files_of(folder)
            connection.execute("BEGIN")  # one state of a run that may still be written
            damage = tuple(_lines("database", _damage(connection)))
            if damage:  # rules over what cannot be relied on would only add noise
                return Verdict({}, 0, 0, 0, damage)
            return _verdict(connection, files)
    except sqlite3.DatabaseError as error:
        return Verdict({}, 0, 0, 0, (f"database: {error}",))


def _verdict(connection: sqlite3.Connection, files: Files) -> Verdict:
    found = [line for rule, sql in LAW.items() for line in _lines(rule, (row[0] for row in connection.execute(sql)))]
    found += [line for rule, broken in FILE_RULES.items() for line in _lines(rule, broken(connection, files))]
    sql = "SELECT (SELECT max(lineage) FROM lineages), (SELECT coalesce(max(step), 0) FROM standing_metrics)"
    lineages, steps = connection.execute(sql).fetchone()
    return Verdict(_counts(connection), lineages, steps, len(files.checkpoints), tuple(found))


def _lines(rule: str, offenders: Iterator[str]) -> Iterator[str]:
    """One line for a rule that does not hold: the first offender, and how many more there are."""
    found = list(offenders)
    if found:
        yield f"{rule}: {found[0]}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def _counts(connection: sqlite3.Connection) -> dict[str, int]:
    sql = "SELECT coalesce(fate, 'pending'), count(*) FROM standing_attempts GROUP BY 1"
    superseded = "SELECT 'superseded', count(*) FROM fates WHERE fate = 'superseded'"
    counted = dict([*connection.execute(sql), *connection.execute(superseded)])
    return {fate: counted.get(fate, 0) for fate in FATES}


def _damage(connection: sqlite3.Connection) -> Iterator[str]:
    """What makes the database itself unfit to be judged."""
    yield from (row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok")
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} belongs to no row of {parent}"
    with closing(sqlite3.connect(":memory:")) as wanted:
        wanted.executescript(TABLES)
        mine, right = _schema(connection), _schema(wanted)
    yield from (f"{name} is missing or not as schema says" for name in right if mine.get(name) != right[name])
    yield from (f"{name} does not belong there" for name in mine if name not in right)


def _schema(connection: sqlite3.Connection) -> dict[str, str]:
    rows = connection.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return dict(rows.fetchall())


FILE_RULES: Mapping[str, FileRule] = {
    "turns": broken_turns,
    "checkpoints": broken_checkpoints,
    "newest checkpoint": lost_checkpoints,
    "model": broken_model,
    "configuration": other_configuration,
}
