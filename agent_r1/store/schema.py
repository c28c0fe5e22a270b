"""The tables of ``run.db`` and how it is opened. Every event is an insert; no row is ever changed."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from agent_r1.core.errors import InvalidInput

SCHEMA_VERSION = 1

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    attempt TEXT NOT NULL UNIQUE, run TEXT NOT NULL, task TEXT NOT NULL,
    group_serial INTEGER NOT NULL, member INTEGER NOT NULL, retry INTEGER NOT NULL,
    split TEXT NOT NULL, version INTEGER NOT NULL
);
CREATE TABLE outcomes (
    attempt TEXT PRIMARY KEY REFERENCES attempts (attempt),
    status TEXT NOT NULL, truncated INTEGER NOT NULL, reason TEXT, seconds REAL NOT NULL,
    task_id TEXT NOT NULL, start BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE turns (
    attempt TEXT NOT NULL REFERENCES attempts (attempt),
    turn INTEGER NOT NULL, parent INTEGER, role TEXT NOT NULL, kind TEXT NOT NULL, stop TEXT NOT NULL,
    tokens BLOB NOT NULL, said BLOB NOT NULL,
    PRIMARY KEY (attempt, turn)
);
CREATE TABLE rewards (
    attempt TEXT NOT NULL REFERENCES attempts (attempt),
    turn INTEGER, name TEXT NOT NULL, value
);
CREATE INDEX rewards_of_attempt ON rewards (attempt);
CREATE TABLE fates (
    attempt TEXT NOT NULL REFERENCES attempts (attempt), lineage INTEGER NOT NULL DEFAULT 1,
    fate TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT,
    PRIMARY KEY (attempt, lineage)
);
CREATE TABLE metrics (
    lineage INTEGER NOT NULL DEFAULT 1, step INTEGER NOT NULL, name TEXT NOT NULL, value,
    PRIMARY KEY (lineage, step, name)
);
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""
# A reward's turn is null where it belongs to the whole trajectory. A value is a number; JSON text where it is
# one number per turn, or not a number; null where it could not be scored.


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
    if not path.is_file():
        raise InvalidInput("run", got=f"{path.parent}, which holds no {path.name}", do="give the folder of a run")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        found = int(row[0]) if row else 0
    except sqlite3.DatabaseError as error:
        connection.close()
        raise InvalidInput("run", got=f"{path}: {error}", do="give the folder of a run") from error
    if found != SCHEMA_VERSION:
        connection.close()
        do = f"read it with the agent-r1 that wrote it; this one reads schema {SCHEMA_VERSION}"
        raise InvalidInput("run", got=f"{path} of schema {found}", do=do)
    return connection
