"""Read a page of a list of attempts. The list can be limited to attempts whose conversations contain a text."""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1.core.trajectory import AttemptId
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
from agent_r1.store.rows import attempt_key, unpack_document

SEARCH_SECONDS = 0.1
"""The time limit of a text search for one page of a list, in seconds.

At the time limit, the search ends, and the page holds the attempts found so far.
"""

SEARCHED_AT_LEAST = 100
"""The number of attempts that a text search reads before SEARCH_SECONDS can end the search."""


@dataclass(frozen=True, slots=True)
class AttemptPage:
    """A page of a list of attempts.

    Attributes:
        last: the last attempt that was read, after which the next page begins. None: there is no next page.
        searched: the number of attempts in which a text was searched; 0 without a search.
    """

    attempts: tuple[AttemptSummary, ...]
    last: AttemptId | None
    searched: int = 0


@dataclass(frozen=True, slots=True)
class AttemptList:
    """A sorted list of attempts.

    Attributes:
        where: the conditions that an attempt in the list meets.
        order: the column by which the list is sorted, such as "reward". Attempts without a value come last.
        descending: whether the largest value comes first.
        text: a text that each attempt contains in its id, in its conversation, in ``status_reason`` or in
            ``fate_reason`` (see :class:`AttemptSummary`). None: no search.
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
    """Return a page of a list of attempts: at most ``limit`` attempts. ``listed`` describes the list.

    The argument ``after`` is the id of the attempt that precedes the page. If ``after`` is None, the page begins with
    the first attempt of the list. With ``backwards``, the list is read in reverse order. If ``listed.text`` is given,
    the search has a time limit (SEARCH_SECONDS). If the search reaches the time limit, the page can have fewer than
    ``limit`` attempts.
    """
    query = _rows_query(connection, listed, after, backwards)
    if listed.text is None:
        # With LIMIT, the database keeps the first rows while it sorts; without, it sorts all rows.
        ids = [row_id for (row_id,) in connection.execute(f"{query.sql} LIMIT ?", (*query.parameters, limit + 1))]
        found = _summaries(connection, ids[:limit])
        return AttemptPage(found, found[-1].attempt if len(ids) > limit else None)
    rows = (row_id for (row_id,) in connection.execute(query.sql, query.parameters))
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
    (key, descends), value, rest = keys[0], place[0], keys[1:]
    further = f"{key} {'<' if descends else '>'} ?"
    if not rest:
        return Query(f"({further})", (value,))
    below = _after(rest, place[1:])
    return Query(f"({further} OR ({key} IS ? AND {below.sql}))", (value, value, *below.parameters))


def _summaries(connection: sqlite3.Connection, ids: Sequence[int]) -> tuple[AttemptSummary, ...]:
    sql = f"SELECT attempts.id, {COLUMNS} FROM {TABLES} WHERE attempts.id IN ({', '.join('?' * len(ids))})"
    found = {row_id: read_summary(row) for row_id, *row in connection.execute(sql, ids)}
    return tuple(found[row_id] for row_id in ids)


def _texts(connection: sqlite3.Connection, row_id: int) -> Iterator[str | bytes]:
    sql = f"SELECT attempt, outcomes.reason, attempts.reason, start FROM {TABLES} WHERE attempts.id = ?"
    *texts, start = connection.execute(sql, (row_id,)).fetchone()
    yield from filter(None, texts)
    if start is not None:
        yield start
    for (content,) in connection.execute("SELECT content FROM turns WHERE attempt_id = ? ORDER BY turn", (row_id,)):
        yield content


def _text_matcher(text: str) -> Callable[[str | bytes], bool]:
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
"""The fields of encoded messages whose values are not searched."""


def _strings(document: Any) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, list):
        for item in document:
            yield from _strings(item)
    elif isinstance(document, dict):
        for key, item in document.items():
            if key not in _STRUCTURE:
                yield from _strings(item)
