"""Pages of a list of attempts, each found by the last attempt of the page before, and search in conversations.

A page by number (OFFSET) reads all earlier pages, and shifts when a run records new attempts. A page by key does not.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agent_r1.core.attempt_id import AttemptId
from agent_r1.store.attempt_list import (
    COLUMNS,
    ORDERS,
    TABLES,
    AttemptFilter,
    AttemptOrder,
    AttemptSummary,
    Query,
    condition_query,
    read_summary,
)
from agent_r1.store.compression import unpack_document
from agent_r1.store.rows import attempt_key

SEARCH_SECONDS = 0.1
"""The time after which a page of a search ends with what it found."""

SEARCHED_AT_LEAST = 100
"""The number of attempts that a page of a search always reads."""


@dataclass(frozen=True, slots=True)
class AttemptPage:
    """A page of a list of attempts.

    Attributes:
        last: the last attempt that was read, after which the next page begins; None on the last page.
        searched: the number of attempts whose text was read; 0 if no text was given.
    """

    attempts: tuple[AttemptSummary, ...]
    last: AttemptId | None
    searched: int = 0


@dataclass(frozen=True, slots=True)
class AttemptList:
    """A list of attempts: which ones, in which order, and the text that their conversations contain.

    Attempts without a value in the column ``order`` come last. Attempts with equal values are in the order of starts.
    """

    where: AttemptFilter = field(default_factory=AttemptFilter)
    order: AttemptOrder = "started"
    descending: bool = True
    text: str | None = None


def read_page(
    connection: sqlite3.Connection,
    listed: AttemptList,
    after: AttemptId | None,
    limit: int,
    backwards: bool = False,
) -> AttemptPage:
    """Return the ``limit`` attempts of a list after the attempt ``after``, or the first ones if ``after`` is None.

    With ``backwards``, return the attempts before ``after``, the nearest first. A search ends after SEARCH_SECONDS.
    """
    query = _rows_query(connection, listed, after, backwards)
    rows = (row_id for (row_id,) in connection.execute(query.sql, query.parameters))
    if listed.text is None:
        ids = list(islice(rows, limit + 1))
        found = _summaries(connection, ids[:limit])
        return AttemptPage(found, found[-1].attempt if len(ids) > limit else None)
    ids, searched = [], 0
    last: AttemptId | None = None
    contains, end = _text_matcher(listed.text), time.monotonic() + SEARCH_SECONDS
    for searched, row_id in enumerate(rows, start=1):
        if any(contains(text) for text in _texts(connection, row_id)):
            ids.append(row_id)
        if len(ids) == limit or (searched >= SEARCHED_AT_LEAST and time.monotonic() > end):
            last = _summaries(connection, [row_id])[0].attempt
            break
    return AttemptPage(_summaries(connection, ids), last, searched)


def _rows_query(connection: sqlite3.Connection, listed: AttemptList, after: AttemptId | None, backwards: bool) -> Query:
    """Return the query of the rows of a list, from the row after ``after`` on."""
    condition, column = condition_query(listed.where), ORDERS[listed.order]
    down = listed.descending
    keys = (
        [("attempts.id", down)]
        if listed.order == "started"
        else [
            (f"({column} IS NULL)", False),
            (column, down),
            ("attempts.id", down),
        ]
    )
    keys = [(key, descends != backwards) for key, descends in keys]
    order = ", ".join(f"{key} {'DESC' if descends else 'ASC'}" for key, descends in keys)
    sql, parameters = f"SELECT attempts.id FROM {TABLES} WHERE {condition.sql}", list(condition.parameters)
    if after is not None:
        columns = ", ".join(key for key, _ in keys)
        sql_of_place = f"SELECT {columns} FROM {TABLES} WHERE attempt = ?"
        place = connection.execute(sql_of_place, (attempt_key(after),)).fetchone()
        if place is None:
            return Query("SELECT 1 WHERE FALSE", ())
        later = _after(keys, place)
        sql, parameters = f"{sql} AND {later.sql}", [*parameters, *later.parameters]
    return Query(f"{sql} ORDER BY {order}", tuple(parameters))


def _after(keys: Sequence[tuple[str, bool]], place: Sequence[Any]) -> Query:
    """Return the condition that a row comes after ``place`` in the order of ``keys``, which are columns and whether
    they descend."""
    (key, descends), value, rest = keys[0], place[0], keys[1:]
    further = f"{key} {'<' if descends else '>'} ?"
    if not rest:
        return Query(f"({further})", (value,))
    below = _after(rest, place[1:])
    return Query(f"({further} OR ({key} IS ? AND {below.sql}))", (value, value, *below.parameters))


def _summaries(connection: sqlite3.Connection, ids: Sequence[int]) -> tuple[AttemptSummary, ...]:
    """Return the summaries of rows of attempts, in the order of ``ids``."""
    sql = f"SELECT attempts.id, {COLUMNS} FROM {TABLES} WHERE attempts.id IN ({', '.join('?' * len(ids))})"
    found = {row_id: read_summary(row) for row_id, *row in connection.execute(sql, ids)}
    return tuple(found[row_id] for row_id in ids)


def _texts(connection: sqlite3.Connection, row_id: int) -> Iterator[str | bytes]:
    """Yield the texts of an attempt: its id and reasons as text, then its opening messages and turns as documents."""
    sql = f"SELECT attempt, outcomes.reason, attempts.reason, start FROM {TABLES} WHERE attempts.id = ?"
    *texts, start = connection.execute(sql, (row_id,)).fetchone()
    yield from filter(None, texts)
    if start is not None:
        yield start
    for (content,) in connection.execute("SELECT content FROM turns WHERE attempt_id = ? ORDER BY turn", (row_id,)):
        yield content


def _text_matcher(text: str) -> Callable[[str | bytes], bool]:
    """Return a function that returns whether a text, or a document of :func:`pack_document`, contains ``text``.

    Upper and lower case are equal. Documents are parsed only if their bytes contain the text.
    """
    wanted = text.casefold()
    # Documents are ASCII JSON, in which letters outside ASCII are escapes whose case cannot be compared.
    raw = json.dumps(wanted)[1:-1].encode() if wanted.isascii() else None

    def contains(stored: str | bytes) -> bool:
        if isinstance(stored, str):
            return wanted in stored.casefold()
        if raw is not None and raw not in zlib.decompress(stored).lower():
            return False
        return any(wanted in part.casefold() for part in _strings(unpack_document(stored)))

    return contains


_STRUCTURE = frozenset({"role", "call_id", "sha256", "mime"})
"""Fields of encoded messages that are no text."""


def _strings(document: Any) -> Iterator[str]:
    """Yield every text in a document, without the roles of messages and the names of fields."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, list):
        for item in document:
            yield from _strings(item)
    elif isinstance(document, dict):
        for key, item in document.items():
            if key not in _STRUCTURE:
                yield from _strings(item)
