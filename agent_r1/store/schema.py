"""The tables of ``run.db`` and how it is opened. Every event is an insert; no row is ever changed."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from agent_r1.core.errors import InvalidInput

SCHEMA_VERSION = 3
"""Raised with every change of the tables. Runs of another schema are refused, older ones too: none is converted."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lineages (lineage INTEGER PRIMARY KEY, step INTEGER NOT NULL, at REAL NOT NULL, config TEXT NOT NULL);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, attempt TEXT NOT NULL, lineage INTEGER NOT NULL REFERENCES lineages (lineage),
    run TEXT NOT NULL, task TEXT NOT NULL, group_serial INTEGER NOT NULL, member INTEGER NOT NULL,
    retry INTEGER NOT NULL, split TEXT NOT NULL, version INTEGER NOT NULL,
    UNIQUE (attempt, lineage)
);
CREATE TABLE outcomes (
    attempt_id INTEGER PRIMARY KEY REFERENCES attempts (id),
    status TEXT NOT NULL, truncated INTEGER NOT NULL, reason TEXT, seconds REAL NOT NULL,
    task_id TEXT NOT NULL, newest_version INTEGER NOT NULL, start BLOB NOT NULL
);
CREATE TABLE turns (
    attempt_id INTEGER NOT NULL REFERENCES outcomes (attempt_id),
    turn INTEGER NOT NULL, parent INTEGER, role TEXT NOT NULL, kind TEXT NOT NULL, stop TEXT NOT NULL,
    tokens BLOB NOT NULL, said BLOB NOT NULL,
    PRIMARY KEY (attempt_id, turn)
);
CREATE TABLE rewards (
    attempt_id INTEGER NOT NULL REFERENCES outcomes (attempt_id),
    turn INTEGER, call INTEGER, name TEXT NOT NULL, value,
    FOREIGN KEY (attempt_id, turn) REFERENCES turns (attempt_id, turn)
);
CREATE INDEX rewards_of_attempt ON rewards (attempt_id);
CREATE TABLE fates (
    attempt_id INTEGER NOT NULL REFERENCES attempts (id),
    lineage INTEGER NOT NULL REFERENCES lineages (lineage),
    fate TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT, credit,
    PRIMARY KEY (attempt_id, lineage)
) WITHOUT ROWID;
CREATE UNIQUE INDEX settled_once ON fates (attempt_id) WHERE fate <> 'superseded';
CREATE TABLE versions (
    lineage INTEGER NOT NULL REFERENCES lineages (lineage), version INTEGER NOT NULL,
    step INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (lineage, version)
) WITHOUT ROWID;
CREATE TABLE metrics (
    lineage INTEGER NOT NULL REFERENCES lineages (lineage), step INTEGER NOT NULL, name TEXT NOT NULL, value,
    exact INTEGER NOT NULL,
    PRIMARY KEY (lineage, step, name)
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, lineage INTEGER NOT NULL REFERENCES lineages (lineage),
    at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE VIEW ends AS
    SELECT lineage, step, coalesce((SELECT min(step) FROM lineages AS later WHERE later.lineage > lineages.lineage),
                                   9223372036854775807) AS last_step
    FROM lineages;
CREATE VIEW standing_metrics AS
    SELECT metrics.rowid AS id, metrics.* FROM metrics JOIN ends USING (lineage) WHERE metrics.step <= last_step;
CREATE VIEW standing_versions AS
    SELECT versions.* FROM versions JOIN ends USING (lineage) WHERE versions.step <= last_step;
CREATE VIEW standing_attempts AS
    SELECT attempts.*, fate, step, reason, credit FROM attempts LEFT JOIN fates ON attempt_id = id
    WHERE NOT EXISTS (SELECT 1 FROM fates AS later WHERE later.attempt_id = id AND later.fate = 'superseded');
CREATE TRIGGER trained_once BEFORE INSERT ON attempts
    WHEN EXISTS (SELECT 1 FROM standing_attempts WHERE attempt = NEW.attempt AND fate IS NOT NULL)
    BEGIN SELECT RAISE(ABORT, 'it met its fate in an earlier lineage'); END;
"""
# A lineage is one stretch of training without a stop, under one configuration: the first begins at step 0, each later
# one at the step of the checkpoint it was resumed from. What stands is what counts in the newest lineage. An attempt
# may be dispatched once per lineage; each time is a row of its own, which meets at most one fate (trained, dropped) and
# may be superseded in a later lineage. A reward's turn is null where it belongs to the whole trajectory, its call where
# it belongs to no single call. A value is a number; JSON text where it is one number per turn, or not a number; null
# where it could not be scored.


def open_writer(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return; transactions are begun by hand."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def close_writer(connection: sqlite3.Connection) -> None:
    """Close, and leave one plain file: reading a WAL needs a folder that can be written."""
    with suppress(sqlite3.Error):  # somebody is reading just now, or the connection broke: the WAL stays
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads. Raises InvalidInput where there is no run, or one of another schema."""
    connection = connect_reader(path)
    try:
        check_schema(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise InvalidInput("run", got=f"{path}: {error}", do="give the folder of a run") from error
    except InvalidInput:
        connection.close()
        raise
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads, whatever it will find. Raises InvalidInput where there is no run."""
    if not path.is_file():
        raise InvalidInput("run", got=f"{path.parent}, which holds no {path.name}", do="give the folder of a run")
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise InvalidInput where the database has another schema, sqlite3.DatabaseError where it is not a run's."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    found = int(row[0]) if row else 0
    if found > SCHEMA_VERSION:
        do = f"read it with the agent-r1 that wrote it, or a newer one; this one reads schema {SCHEMA_VERSION}"
        raise InvalidInput("run", got=f"{path} of schema {found}, which is newer", do=do)
    if found < SCHEMA_VERSION:
        do = f"read it with the agent-r1 that wrote it: runs are not converted to schema {SCHEMA_VERSION}"
        raise InvalidInput("run", got=f"{path} of schema {found}, which is older", do=do)


def run_name(connection: sqlite3.Connection) -> str:
    """The name that a run was given when it was made."""
    return str(connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()[0])
