"""The tables of ``run.db``, and connections to ``run.db``. Every event becomes new rows; rows are never changed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput

SCHEMA_VERSION = 12
"""The version of the tables, increased with every change. A run of a different version is refused."""

# - id: the rows of a table are numbered from 1, in the order in which they were written.
# - segment: a stretch of training without a stop, with one configuration. The first segment begins at step 0. Each
#   later segment begins at the step of the checkpoint from which the run was resumed.
# - The views current_* show the run without superseded rows.
# - An attempt can be started once per segment. Each start is a new row in attempts. Each such row gets at most one fate
#   (trained or dropped), and can be superseded in a later segment.
# - outcomes: turns, action_tokens, calls, call_errors (calls whose result is an error) and reward summarize the turns
#   and rewards, so that lists of attempts are filtered and sorted quickly. reward is the weighted sum of all rewards;
#   null if the attempt failed, or if a reward could not be computed.
# - turns: start_seconds, first_token_seconds and end_seconds are measured from the start of the attempt. They and
#   env_seconds are null if they were not measured, and first_token_seconds also if the engine does not report it.
# - token_records: the numbers that an update computed for the action tokens of a turn, for some attempts of each step.
#   They belong to the step of the fate of the attempt, and are superseded together with the attempt.
# - images: the files of all images in messages. An image that occurs several times is stored once. Messages refer to
#   it by its sha256.
# - rewards: turn is null if the reward belongs to the whole trajectory. call is null if the reward belongs to no single
#   call. value is a number, JSON text (one number per turn), the text NaN, or null if the reward could not be computed.
# - metrics: reproducible is 1 if an exact repetition of the run gives the same number, and 0 for timings.
TABLES = """
CREATE TABLE meta (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE, value TEXT NOT NULL
);
CREATE TABLE segments (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL UNIQUE, step INTEGER NOT NULL, time REAL NOT NULL, config TEXT NOT NULL
);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    attempt TEXT NOT NULL, segment INTEGER NOT NULL REFERENCES segments (segment),
    run TEXT NOT NULL, task TEXT NOT NULL, group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    retry INTEGER NOT NULL, split TEXT NOT NULL, version INTEGER NOT NULL,
    UNIQUE (attempt, segment)
);
CREATE INDEX attempts_of_group ON attempts (group_id);
CREATE INDEX attempts_of_task ON attempts (task);
CREATE TABLE outcomes (
    id INTEGER PRIMARY KEY,
    attempt_id INTEGER NOT NULL UNIQUE REFERENCES attempts (id),
    status TEXT NOT NULL, truncated INTEGER NOT NULL, reason TEXT, seconds REAL NOT NULL,
    task_id TEXT NOT NULL, newest_version INTEGER NOT NULL,
    turns INTEGER NOT NULL, action_tokens INTEGER NOT NULL, calls INTEGER NOT NULL, call_errors INTEGER NOT NULL,
    reward, start BLOB NOT NULL, answer TEXT, start_time REAL NOT NULL, wait_seconds REAL NOT NULL
);
CREATE INDEX outcomes_by_status ON outcomes (status);
CREATE TABLE images (
    id INTEGER PRIMARY KEY,
    sha256 TEXT NOT NULL UNIQUE, mime TEXT NOT NULL, data BLOB NOT NULL
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY,
    attempt_id INTEGER NOT NULL REFERENCES outcomes (attempt_id),
    turn INTEGER NOT NULL, parent INTEGER, kind TEXT NOT NULL, finish_reason TEXT NOT NULL,
    tokens BLOB NOT NULL, content BLOB NOT NULL,
    start_seconds REAL, first_token_seconds REAL, end_seconds REAL, env_seconds REAL,
    UNIQUE (attempt_id, turn)
);
CREATE TABLE rewards (
    id INTEGER PRIMARY KEY,
    attempt_id INTEGER NOT NULL REFERENCES outcomes (attempt_id),
    turn INTEGER, call INTEGER, name TEXT NOT NULL, value,
    FOREIGN KEY (attempt_id, turn) REFERENCES turns (attempt_id, turn)
);
CREATE INDEX rewards_of_attempt ON rewards (attempt_id);
CREATE TABLE token_records (
    id INTEGER PRIMARY KEY,
    attempt_id INTEGER NOT NULL, turn INTEGER NOT NULL, numbers BLOB NOT NULL,
    UNIQUE (attempt_id, turn), FOREIGN KEY (attempt_id, turn) REFERENCES turns (attempt_id, turn)
);
CREATE TABLE fates (
    id INTEGER PRIMARY KEY,
    attempt_id INTEGER NOT NULL REFERENCES attempts (id),
    segment INTEGER NOT NULL REFERENCES segments (segment),
    fate TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT, credit,
    UNIQUE (attempt_id, segment)
);
CREATE UNIQUE INDEX one_fate_per_attempt ON fates (attempt_id) WHERE fate <> 'superseded';
CREATE INDEX superseded_attempts ON fates (attempt_id) WHERE fate = 'superseded';
CREATE INDEX fates_by_name ON fates (fate, attempt_id);
CREATE INDEX fates_of_step ON fates (step);
CREATE TABLE versions (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments (segment), version INTEGER NOT NULL,
    step INTEGER NOT NULL, checksum TEXT,
    UNIQUE (segment, version)
);
CREATE TABLE metrics (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments (segment), step INTEGER NOT NULL, name TEXT NOT NULL, value,
    reproducible INTEGER NOT NULL,
    UNIQUE (segment, step, name)
);
CREATE INDEX metrics_by_name ON metrics (name, step);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL REFERENCES segments (segment),
    time REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE VIEW segment_ends AS
    SELECT segment, step, coalesce((SELECT min(step) FROM segments AS later WHERE later.segment > segments.segment),
                                   9223372036854775807) AS last_step
    FROM segments;
CREATE VIEW current_metrics AS
    SELECT metrics.* FROM metrics JOIN segment_ends USING (segment) WHERE metrics.step <= last_step;
CREATE VIEW current_versions AS
    SELECT versions.* FROM versions JOIN segment_ends USING (segment) WHERE versions.step <= last_step;
CREATE VIEW current_attempts AS
    SELECT attempts.*, fate, step, reason, credit
    FROM attempts LEFT JOIN fates ON attempt_id = attempts.id AND fate <> 'superseded'
    WHERE attempts.id NOT IN (SELECT attempt_id FROM fates WHERE fate = 'superseded');
CREATE TRIGGER no_restart_after_fate BEFORE INSERT ON attempts
    WHEN EXISTS (SELECT 1 FROM current_attempts WHERE attempt = NEW.attempt AND fate IS NOT NULL)
    BEGIN SELECT RAISE(ABORT, 'it got its fate in an earlier segment'); END;
"""

# The order of the tables in digests.
TABLE_NAMES = (
    *("meta", "segments", "attempts", "outcomes", "images", "turns", "rewards"),
    *("token_records", "fates", "versions", "metrics", "events"),
)

COMPLETED = """EXISTS (SELECT 1 FROM events WHERE kind = 'completed'
                       AND segment = (SELECT max(segment) FROM segments))"""


def open_writer(path: Path) -> sqlite3.Connection:
    """Return a connection to the database ``path`` for writing. The caller must begin each transaction explicitly.

    A commit returns after its rows are on the disk.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def close_writer(connection: sqlite3.Connection) -> None:
    """Close a connection and merge the WAL file into the database file."""
    with suppress(sqlite3.Error):  # a reader is active or the connection broke: the WAL file stays
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the rows that the ``with`` block inserts, or no row if the block raises an error."""
    connection.execute("BEGIN IMMEDIATE")
    with _undo_after_error(connection, "ROLLBACK"):
        yield
        connection.execute("COMMIT")


@contextmanager
def savepoint(connection: sqlite3.Connection) -> Iterator[None]:
    """Undo the rows of the ``with`` block if it raises an error. The transaction around it goes on."""
    connection.execute("SAVEPOINT submission")
    with _undo_after_error(connection, "ROLLBACK TO submission"):
        yield
    connection.execute("RELEASE submission")


@contextmanager
def _undo_after_error(connection: sqlite3.Connection, statement: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):  # after a disk error, SQLite has already undone the transaction
            connection.execute(statement)
        raise


def insert(connection: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows with a value for each column except ``id``. Raise sqlite3.IntegrityError if a constraint fails."""
    if rows:
        connection.executemany(f"INSERT INTO {table} VALUES (NULL{', ?' * len(rows[0])})", rows)


def open_reader(path: Path) -> sqlite3.Connection:
    """Return a read-only connection.

    Raises InvalidInput if ``path`` is not the database of a run, or if its schema version is not SCHEMA_VERSION.
    """
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
    """Return a read-only connection without checking the content. Raises InvalidInput if ``path`` is not a file."""
    if not os.path.isfile(path):  # also False if the text cannot be a path
        raise InvalidInput("run", got=f"{path.parent}, which holds no {path.name}", do="give the folder of a run")
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise InvalidInput if the schema version of the database is not ``SCHEMA_VERSION``.

    Raise sqlite3.DatabaseError if the database has no readable schema version.
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None or not str(row[0]).isdecimal():
        raise sqlite3.DatabaseError("its schema version cannot be read")
    found = int(row[0])
    if found > SCHEMA_VERSION:
        do = f"read it with the agent-r1 that wrote it, or a newer one; this one reads schema {SCHEMA_VERSION}"
        raise InvalidInput("run", got=f"{path} of schema {found}, which is newer", do=do)
    if found < SCHEMA_VERSION:
        do = f"read it with the agent-r1 that wrote it: runs are not converted to schema {SCHEMA_VERSION}"
        raise InvalidInput("run", got=f"{path} of schema {found}, which is older", do=do)


def read_run_name(connection: sqlite3.Connection) -> str:
    """Return the name with which the run was created."""
    return str(connection.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()[0])
