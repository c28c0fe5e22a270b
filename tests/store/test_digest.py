"""Equal runs have equal digests, whatever their names and times are; any other changed bit changes the digest."""

import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.store.reader import RunReader
from agent_r1.store.rows import TurnTokens, pack_columns, pack_document, unpack_document
from agent_r1.store.schema import TABLE_NAMES
from agent_r1.store.verification import run_digest


def digest(folder: Path) -> str:
    with closing(RunReader(folder)) as reader:
        return run_digest(reader)


def test_a_resumed_run_has_the_digest_of_an_uninterrupted_one(uninterrupted: Path, resumed: Path) -> None:
    assert digest(uninterrupted) == digest(resumed)


def test_the_name_does_not_matter(uninterrupted: Path) -> None:
    with closing(sqlite3.connect(uninterrupted / "run.db")) as connection, connection:
        before = digest(uninterrupted)
        connection.execute("UPDATE attempts SET run = 'other', attempt = replace(attempt, 'demo:', 'other:')")
    assert digest(uninterrupted) == before


Change = Callable[[Any], Any]


def bit(value: Any) -> Any:
    """Return the value with its lowest bit flipped."""
    if isinstance(value, int):
        return value ^ 1
    if isinstance(value, float):
        [bits] = struct.unpack("<Q", struct.pack("<d", value))
        return struct.unpack("<d", struct.pack("<Q", bits ^ 1))[0]
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    return value[:-1] + chr(ord(value[-1]) ^ 1)


def token(which: str) -> Change:
    def changed(blob: bytes) -> bytes:
        tokens = TurnTokens.unpack(blob)
        values = getattr(tokens, which)
        return tokens._replace(**{which: (*values[:-1], bit(values[-1]))}).pack()

    return changed


def content(place: int) -> Change:
    def changed(blob: bytes) -> bytes:
        parts = unpack_document(blob)
        action, version_spans = parts[0], parts[3]
        parts[place] = {0: [action[0], "other words"], 1: [], 2: [], 3: [[0, bit(version_spans[0][1])]]}[place]
        return pack_document(parts)

    return changed


def reward(value: Any) -> Any:
    return "[0.5, 0.5, 0.25]" if isinstance(value, str) else 0.0 if value is None else bit(value)


COVERED: dict[str, Change] = {
    **{f"attempts.{name}": bit for name in ("task", "group_id", "retry", "split", "version")},
    "attempts.sample_index": lambda index: index + 10,
    "outcomes.status": lambda _: "completed",
    "outcomes.truncated": bit,
    "outcomes.task_id": bit,
    "outcomes.answer": lambda answer: "Bruno" if answer is None else bit(answer),
    **{f"turns.{name}": bit for name in ("kind",)},
    "turns.turn": lambda turn: turn + 10,
    "turns.parent": lambda parent: 7 if parent is None else parent + 7,
    "turns.finish_reason": lambda _: "length",
    **{f"turns.tokens {which}": token(which) for which in ("new_ids", "action_ids", "logprobs")},
    "turns.content 3": content(3),
    "rewards.turn": lambda turn: 0 if turn is None else None,
    "rewards.call": lambda call: 0 if call is None else call + 1,
    "rewards.name": bit,
    "rewards.value": reward,
    "fates.fate": lambda fate: "dropped" if fate == "trained" else "trained",
    "fates.step": bit,
    "fates.credit": lambda credit: 0.5 if credit is None else bit(credit),
    "versions.version": lambda version: version + 10,
    "versions.step": lambda step: step + 10,
    "versions.checksum": bit,
    "metrics.step": lambda step: step + 10,
    "metrics.name": lambda name: name + "s",
    "metrics.value": bit,
}
"""The columns that equal runs agree in, each with a small change."""

NOT_COVERED: dict[str, Change] = {
    "outcomes.reason": bit,
    **{f"outcomes.{name}": bit for name in ("seconds", "start_time", "wait_seconds")},
    **{f"turns.{name}": bit for name in ("start_seconds", "first_token_seconds", "end_seconds", "env_seconds")},
    **{f"images.{name}": bit for name in ("sha256", "mime", "data")},
    "outcomes.newest_version": bit,
    **{f"outcomes.{name}": bit for name in ("turns", "action_tokens", "calls", "call_errors")},
    "outcomes.reward": lambda _: 0.5,
    "token_records.turn": lambda turn: turn + 5,
    "token_records.numbers": lambda _: pack_columns([(1.0,)] * 4),
    "outcomes.start": lambda _: pack_document([]),
    "fates.reason": lambda _: "another",
    "events.time": bit,
    "events.kind": bit,
    "events.detail": bit,
    "segments.time": bit,
    "segments.config": lambda value: value.replace("4", "5"),
    "meta.value": lambda value: value.replace("demo", "omed"),
}
"""Names, texts for people and times; and columns that follow from covered ones."""

STRUCTURE = {
    *(f"{table}.attempt_id" for table in ("outcomes", "turns", "token_records", "rewards", "fates")),
    *(f"{table}.segment" for table in ("attempts", "fates", "versions", "metrics", "events", "segments")),
    *(
        "attempts.run",
        "attempts.attempt",
        "meta.key",
        "metrics.reproducible",
        "segments.step",
    ),
    *(f"{table}.id" for table in TABLE_NAMES),
}
"""Names, columns that connect rows or decide which of them are current, and the numbers of rows."""


def columns(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {f"{table}.{row[1]}" for table in tables for row in connection.execute(f"PRAGMA table_info({table})")}


def test_every_column_is_in_one_of_the_lists(uninterrupted: Path) -> None:
    named = [key.partition(" ")[0] for key in (*COVERED, *NOT_COVERED, *STRUCTURE)]
    assert columns(uninterrupted) == set(named)


def test_every_field_of_a_trajectory_is_in_one_of_the_lists() -> None:
    # A new field of the types must be added here, covered or not.
    covered = {
        "index",
        "parent",
        "new_ids",
        "action_ids",
        "logprobs",
        "version_spans",
        "finish_reason",
        "rewards",
        "kind",
    }
    covered |= {"call_rewards", "call_ends"}
    assert {field.name for field in fields(Turn)} == covered | {
        *("action", "observation", "results", "new_messages", "tools", "media", "timing"),
    }
    covered = {"attempt", "task_id", "turns", "status", "truncated", "rewards", "answer"}
    assert {field.name for field in fields(Trajectory)} == covered | {
        "reason",
        "start",
        "seconds",
        "start_time",
        "wait_seconds",
    }


@contextmanager
def changed(folder: Path, key: str, change: Change, row: int) -> Iterator[bool]:
    """Change one row of a column while the block runs; yield False if the change had no effect."""
    table, _, column = key.partition(" ")[0].partition(".")
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        condition = " WHERE reproducible" if table == "metrics" else ""
        rows = connection.execute(f"SELECT id, {column} FROM {table}{condition} ORDER BY 1").fetchall()
        place, value = rows[row % len(rows)]
        new = value if value is None and column == "reason" else change(value)
        update = f"UPDATE {table} SET {column} = ? WHERE id = ?"
        connection.execute(update, (new, place))
        try:
            yield new != value
        finally:
            connection.execute(update, (value, place))


@pytest.fixture(scope="module")
def run(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(runs / "uninterrupted", tmp_path_factory.mktemp("digest") / "run"))


@pytest.mark.parametrize("key", COVERED)
def test_each_covered_column_changes_the_digest(run: Path, key: str) -> None:
    before = digest(run)
    with changed(run, key, COVERED[key], 0):
        assert digest(run) != before


@pytest.mark.parametrize("key", [*NOT_COVERED, "turns.content 0", "turns.content 1", "turns.content 2"])
def test_other_columns_do_not_change_the_digest(run: Path, key: str) -> None:
    change = NOT_COVERED.get(key) or content(int(key[-1]))
    before = digest(run)
    with changed(run, key, change, 1):
        assert digest(run) == before


def test_superseded_rows_do_not_change_the_digest(resumed: Path) -> None:
    before = digest(resumed)
    with closing(sqlite3.connect(resumed / "run.db")) as connection, connection:
        gone = "(SELECT attempt_id FROM fates WHERE fate = 'superseded')"
        connection.execute(f"UPDATE attempts SET split = 'other', version = 1 WHERE id IN {gone}")
        connection.execute(f"UPDATE rewards SET value = 0.125 WHERE attempt_id IN {gone}")
        connection.execute("UPDATE metrics SET value = 0.125 WHERE segment = 1 AND step > 2")
        connection.execute("UPDATE versions SET checksum = 'other' WHERE segment = 1 AND step > 2")
    assert digest(resumed) == before
