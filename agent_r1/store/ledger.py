"""The ledger: the rows of all tables in one order, each with a seal.

The seal of a row is a hash of the previous seal and of the row's table, index and values. So one seal covers all rows
up to its own row, and any later change of these rows is detected.

The last seal is in the table ``head``, in the manifest of each checkpoint and model, and in ``seal.json``, which is
written when a run is closed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1.core.files import atomic_write
from agent_r1.store.schema import KEYS, connect_reader

SEAL_FILE = "seal.json"

SEAL_BYTES = 16


class Seal(NamedTuple):
    """The seal of one row: a hash of this row and all rows before it.

    Example:
        Seal(row=8123, value=bytes.fromhex("9f86d081884c7d659a2feaa0c55ad015"))
    """

    row: int
    value: bytes

    def to_json(self) -> dict[str, Any]:
        return {"row": self.row, "seal": self.value.hex()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seal:
        """Return the seal that :meth:`to_json` converted. Raises ValueError, KeyError or TypeError for other data."""
        return cls(int(data["row"]), bytes.fromhex(data["seal"]))


START = Seal(0, bytes(SEAL_BYTES))
"""The seal of a ledger without rows. The seal of the first row is computed from this seal."""


def compute_seal(previous: Any, table: str, row: int, values: Iterable[Any]) -> bytes:
    """Return the BLAKE2b hash of the previous row's seal and of this row."""
    content = b"".join(map(_encode, (previous, table, row, *values)))
    return hashlib.blake2b(content, digest_size=SEAL_BYTES).digest()


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        content = value.encode("utf-8", "surrogateescape")
        return b"t%d:%b" % (len(content), content)
    if isinstance(value, int):
        return b"i%d:" % value
    if isinstance(value, float):
        return b"f" + _FLOAT.pack(value)
    if isinstance(value, bytes):
        return b"b%d:%b" % (len(value), value)
    if value is None:
        return b"n"
    raise TypeError(f"{type(value).__name__} is not a type of column values")


_FLOAT = struct.Struct("<d")


class Ledger:
    """A writer that appends rows to a database, each with a seal: a hash of this row and all earlier rows.

    ``head`` is the seal of the last row.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.head = read_head(connection)

    def append(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows to a table, within a transaction. Raises sqlite3.IntegrityError if a constraint fails.

        Each row has the values of all columns except ``id`` and ``seal``, with the types that SQLite returns.
        """
        sealed = self._seal(table, rows)
        if sealed:
            self._connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(sealed[0]))})", sealed)
            self.head = Seal(*sealed[-1][:2])

    def _seal(self, table: str, rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
        last, seal = self.head
        sealed: list[tuple[Any, ...]] = []
        for row, values in enumerate(rows, start=last + 1):
            seal = compute_seal(seal, table, row, values)
            sealed.append((row, seal, *values))
        return sealed

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the rows that the ``with`` block appends, or no row if the block raises an error."""
        with self._undo_after_error("ROLLBACK"):
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("UPDATE head SET row = ?, seal = ?", self.head)
            self._connection.execute("COMMIT")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Run the ``with`` block as a part of the open transaction.

        If the block raises an error, only the rows of the block are undone.
        """
        with self._undo_after_error("ROLLBACK TO submission"):
            self._connection.execute("SAVEPOINT submission")
            yield
        self._connection.execute("RELEASE submission")

    @contextmanager
    def _undo_after_error(self, statement: str) -> Iterator[None]:
        head = self.head
        try:
            yield
        except BaseException:
            self.head = head
            with suppress(sqlite3.Error):  # after a disk error, SQLite has already undone the transaction
                self._connection.execute(statement)
            raise


def read_head(connection: sqlite3.Connection) -> Seal:
    """Return the seal in the table ``head``: the index of the ledger's last row, and a hash of all rows of the ledger.

    Raises sqlite3.DatabaseError if the table does not hold exactly one seal.
    """
    match connection.execute("SELECT row, seal FROM head").fetchall():
        case [(int(row), bytes(seal))]:
            return Seal(row, seal)
    raise sqlite3.DatabaseError("the table head does not hold one seal")


def read_latest_seal(database: Path) -> Seal | None:
    """Return the last seal of a ledger: the index of the ledger's last row, and a hash of all rows of the ledger.

    Return None if the file ``database`` does not exist.
    """
    if not database.exists():
        return None
    with closing(connect_reader(database)) as connection:
        return read_head(connection)


def write_seal_file(folder: Path, seal: Seal) -> None:
    """Write a seal to ``seal.json`` in ``folder``. Raises OSError if this is impossible."""
    atomic_write(folder / SEAL_FILE, json.dumps(seal.to_json()).encode("ascii"))


def contradicts(connection: sqlite3.Connection, seal: Seal) -> str | None:
    """Return the reason why the database contradicts a recorded seal, or None.

    A seal is a hash of a row and all earlier rows.
    """
    for table in KEYS:
        found = connection.execute(f"SELECT seal FROM {table} WHERE id = ?", (seal.row,)).fetchone()
        if found is not None:
            return None if found[0] == seal.value else f"row {seal.row} was recorded with another seal"
    return f"row {seal.row} was recorded and is gone"


def broken_rows(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield one line for each change that :class:`Ledger` did not make: an inserted, changed or removed row."""
    last = START
    for table, row, seal, *values in merge(*(_read_rows(connection, table) for table in KEYS), key=itemgetter(1)):
        if row <= last.row:
            yield f"{_describe(connection, table, row, values)} was added"
        elif row > last.row + 1:
            yield f"row {last.row + 1} is gone, before {_describe(connection, table, row, values)}"
        elif seal != compute_seal(last.value, table, row, values):
            yield f"{_describe(connection, table, row, values)} is not as it was recorded"
        last = Seal(row, seal)
    if last != (head := read_head(connection)):
        yield f"row {last.row} is the last one and does not have the seal of the last one recorded, row {head.row}"


def _read_rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    return ((table, *row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY id"))


def _describe(connection: sqlite3.Connection, table: str, row: int, values: Sequence[Any]) -> str:
    columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    key = {name: value for name, value in zip(columns[2:], values, strict=True) if name in KEYS[table]}
    if "attempt_id" in key:
        number = key.pop("attempt_id")
        number = number if isinstance(number, int) else None  # a damaged id can be text that cannot be encoded
        attempt = connection.execute("SELECT attempt FROM attempts WHERE id = ?", (number,)).fetchone()
        key = {"attempt": attempt and attempt[0], **key}
    step = connection.execute("SELECT step FROM metrics WHERE id < ? ORDER BY id DESC LIMIT 1", (row,)).fetchone()
    words = [*(f"{name} {value!r}" for name, value in key.items()), f"after step {step[0] if step else 0}"]
    return f"row {row}, in {table} ({', '.join(words)})"
