"""T4b: the database of a finished run, with bits flipped and with values edited by hand."""

from __future__ import annotations

import io
import math
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fault_case import NOTHING, Case, Control, Outcome, Size
from micro_run import train_or_resume
from processes import Child
from scenarios import SPARSE

from agent_r1.cli import main
from agent_r1.store import invariants, reader
from agent_r1.training.progress import SilentProgress

NOT_NOTICED, TRACEBACK = "changed a stored value and was not noticed", "ended verify in a traceback"

EDITS = 11
"""One change in so many is an edit of a value, the others flip a bit."""

Change = Callable[[Path, random.Random], str]
"""Changes a database, and returns a description."""


def change_database(size: Size) -> Outcome:
    """Train a run to its end and change its database, one change at a time."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        ended = Child(train_or_resume, folder, SPARSE, SilentProgress()).wait()
        if ended.error is not None:
            return Outcome(0, (ended.error,))
        return change_and_verify(folder, size)


def change_database_without_digests(size: Size) -> Outcome:
    """Do the same with a ``verify`` that does not compare the rows with their digests."""
    with (
        patch.object(invariants, "check_closed", lambda connection, content: []),
        patch.object(reader, "changed_tables", lambda connection, recorded: []),
    ):
        return change_database(size)


def change_and_verify(folder: Path, size: Size) -> Outcome:
    """Change the database of a run, one change at a time. A change of a stored value must be noticed."""
    database, drawn, outcome = folder / "run.db", random.Random(size.seed), NOTHING
    whole, before = database.read_bytes(), read_values(database)
    for number in range(size.injections):
        change = edit_value if number % EDITS == 0 else flip_bit
        described = change(database, drawn)
        answer, changed = run_verify(folder), read_values(database) != before
        problem = TRACEBACK if answer is None else NOT_NOTICED if changed and answer == 0 else None
        kind = "edits" if change is edit_value else f"flips, {'value changed' if changed else 'no value changed'}"
        counts = {kind: 1, f"{kind}, noticed": int(answer != 0)}  # a changed free page need not be noticed
        outcome += Outcome(1, () if problem is None else (f"{described} {problem}",), counts)
        database.write_bytes(whole)
    return outcome


def flip_bit(database: Path, drawn: random.Random) -> str:
    """Flip one bit of the file."""
    content = bytearray(database.read_bytes())
    place, bit = drawn.randrange(len(content)), drawn.randrange(8)
    content[place] ^= 1 << bit
    database.write_bytes(content)
    return f"bit {bit} of byte {place}"


def edit_value(database: Path, drawn: random.Random) -> str:
    """Change one value of one row; another one if a constraint of the table forbids the change."""
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        while True:
            table = drawn.choice(tables)
            column = drawn.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
            rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            if not rows:  # a run without images has none in their table
                continue
            row, value = drawn.choice(rows)
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (another(value, drawn), row))
            except sqlite3.IntegrityError:
                continue
            return f"{table}.{column} of row {row}"


def another(value: Any, drawn: random.Random) -> Any:
    """Return a value that differs as little as possible."""
    if value is None:
        return drawn.choice([0, "", 1.5])
    if isinstance(value, int):
        return value + drawn.choice([1, -1, 0.5])
    if isinstance(value, float):
        return math.nextafter(value, drawn.choice([math.inf, -math.inf]))
    place = drawn.randrange(len(value)) if value else 0
    one, other = ("x", "y") if isinstance(value, str) else (b"x", b"y")
    inserted = other if value[place : place + 1] == one else one
    return value[:place] + inserted + value[place + drawn.randrange(2) :]


def read_values(database: Path) -> list[str] | None:
    """Return every stored value of a database, the schema included; None if it cannot be read."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            return list(_values(connection))
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def _values(connection: sqlite3.Connection) -> Iterator[str]:
    schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    yield from map(repr, schema)
    for kind, name, *_ in schema:
        if kind == "table":
            yield from map(repr, connection.execute(f'SELECT * FROM "{name}" NOT INDEXED'))


def run_verify(folder: Path) -> int | None:
    """Return the exit code of ``agent-r1 verify FOLDER --digest``; None after a traceback."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), redirect_stderr(io.StringIO()):
        try:
            return main(["verify", str(folder), "--digest"])
        except Exception:
            return None


CHANGED_DATABASE = Case(
    "T4b",
    f"run.db of a finished run: one bit flipped, or (1 in {EDITS}) one value edited by SQL",
    "verify --digest reports every change of a stored value, and never ends in a traceback",
    change_database,
    2200,
    22,
    (Control("digests not compared", NOT_NOTICED, change_database_without_digests, 66),),
)
