"""A run that was closed, and the checkpoints of any run, have digests of the rows: each changed table is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_database import change_and_verify, run_verify
from fault_case import Size
from recorded_runs import record_all

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFinished, AttemptStarted, Event, LogEvent, StepMetrics
from agent_r1.core.trajectory import Trajectory
from agent_r1.store import invariants, reader
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.manifest import DIGEST_FILE, RowsDigest, read_digest
from agent_r1.store.schema import TABLE_NAMES
from agent_r1.store.verification import verify


def run_sql(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0


ONE = "(SELECT min(id) FROM rewards WHERE name = 'format')"

CHANGES: dict[str, tuple[str, str]] = {
    "a number": (
        "UPDATE rewards SET value = value + 1 WHERE name = 'exact_match'",
        "table rewards differs",
    ),
    "a blob": ("UPDATE token_records SET numbers = x'78' WHERE turn = 0", "table token_records differs"),
    "a text": ("UPDATE events SET detail = 'another'", "table events differs from its 1 recorded rows"),
    "another type": ("UPDATE metrics SET value = 'NaN' WHERE step = 3 AND name = 'loss'", "table metrics differs"),
    "an integer in place of a float": ("UPDATE rewards SET value = 1 WHERE value = 1.0", "table rewards differs"),
    "the last bit of a time": ("UPDATE segments SET time = time * (1 + 1e-15)", "table segments differs"),
    "the name of the run": ("UPDATE meta SET value = 'other' WHERE key = 'run'", "table meta differs"),
    "text that is no UTF-8": ("UPDATE events SET detail = CAST(x'e9ff0a' AS TEXT)", "table events differs"),
    "a deleted row": (f"DELETE FROM rewards WHERE id = {ONE}", "table rewards has 79 of 80 recorded rows"),
    "all rows deleted": ("DELETE FROM events", "table events has 0 of 1 recorded rows"),
    "an added row": (
        "INSERT INTO metrics SELECT 10000, segment, step, 'more', 0.5, 1 FROM metrics WHERE step = 1 LIMIT 1",
        "table metrics has 1 rows more than were recorded",
    ),
    "a row in another place": (f"UPDATE rewards SET id = 9999 WHERE id = {ONE}", "table rewards differs"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_table_that_changed_is_named(name: str, uninterrupted: Path) -> None:
    statement, message = CHANGES[name]
    run_sql(uninterrupted, statement)
    line = verify(uninterrupted).violations[0]
    assert line.startswith("rows: ") and message in line and "\n" not in line
    assert run_verify(uninterrupted) == 1
    with pytest.raises(InvalidInput, match="changed since it was closed: "):
        reopen_run(uninterrupted)


def test_a_truncated_database_is_noticed(uninterrupted: Path) -> None:
    size = (uninterrupted / "run.db").stat().st_size
    for length in (size - 4096, size // 2, 100, 0):
        os.truncate(uninterrupted / "run.db", length)
        assert run_verify(uninterrupted) == 1


def test_random_changes_of_the_database_are_noticed(resumed: Path) -> None:
    outcome = change_and_verify(resumed, Size(110, 0, 1))
    assert outcome.violations == () and outcome.counts["edits, noticed"] == 10
    assert outcome.counts["flips, value changed, noticed"] > 5  # about 20: most bits belong to free pages


def test_without_digests_changes_are_missed(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "check_closed", lambda connection, content: [])
    monkeypatch.setattr(reader, "changed_tables", lambda connection, recorded: [])
    assert change_and_verify(resumed, Size(33, 0, 1)).violations != ()


def test_checkpoints_and_the_model_have_digests_too(resumed: Path) -> None:
    run_sql(resumed, "UPDATE outcomes SET seconds = seconds + 1")
    lines = verify(resumed).violations
    assert [line.partition(": ")[0] for line in lines] == ["rows", "checkpoints", "model"]
    assert all("table outcomes differs from its" in line for line in lines)
    for name in ("checkpoints", "model"):
        shutil.rmtree(resumed / name)
    (resumed / DIGEST_FILE).unlink()
    assert verify(resumed).is_valid  # nothing is left that knew the rows


@pytest.mark.parametrize("content", ["[]", "{}", '{"sha256": "0", "tables": {}}', "\0"])
def test_a_digest_file_that_cannot_be_read_is_a_violation(content: str, uninterrupted: Path) -> None:
    (uninterrupted / DIGEST_FILE).write_text(content, "utf-8")
    assert verify(uninterrupted).violations[0].startswith(f"rows: {DIGEST_FILE} cannot be read")


def test_a_digest_file_that_was_edited_is_a_violation(uninterrupted: Path) -> None:
    data = json.loads((uninterrupted / DIGEST_FILE).read_text("utf-8"))
    data["tables"]["rewards"]["rows"] -= 1
    (uninterrupted / DIGEST_FILE).write_text(json.dumps(data), "utf-8")
    assert "its sha256 is not that of its tables" in verify(uninterrupted).violations[0]


def test_an_older_copy_of_the_database_is_noticed(folder: Path, script: Any) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1))
    shutil.copy(folder / "run.db", folder / "older.db")
    with closing(reopen_run(folder)) as writer:
        record_all(writer, script.sampling(2))
    (folder / "older.db").replace(folder / "run.db")
    assert "recorded rows" in verify(folder).violations[0]


def test_rows_that_no_digest_covers_are_counted(folder: Path, script: Any) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1))
        report = verify(folder)  # as after a kill: nothing was closed
        assert report.is_valid and report.not_closed == report.rows and report.warnings == ()
    assert verify(folder).not_closed == 0


def test_a_run_that_is_opened_again_is_closed_again_with_all_rows(resumed: Path) -> None:
    before = read_digest(resumed / "run.db")
    with closing(reopen_run(resumed)) as writer:
        assert not (resumed / DIGEST_FILE).exists()
        writer.open_segment(2, {"steps": 4})
        record_all(writer, [LogEvent("resumed", "from step 2")])
    after, report = read_digest(resumed / "run.db"), verify(resumed)
    assert before is not None and after is not None and after.rows > before.rows and report.is_valid
    assert (report.segments, report.rows, report.not_closed, report.rows_sha256) == (3, after.rows, 0, after.sha256)
    assert RowsDigest.from_json(json.loads((resumed / DIGEST_FILE).read_text("utf-8"))) == after


def test_a_run_that_another_process_opens_during_the_check_is_not_judged(
    uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = invariants.check_closed

    def while_it_is_opened(connection: sqlite3.Connection, content: bytes) -> list[str]:
        (uninterrupted / DIGEST_FILE).unlink()
        return check(connection, content)

    run_sql(uninterrupted, "INSERT INTO events VALUES (NULL, 1, 0.0, 'more', '')")
    monkeypatch.setattr(invariants, "check_closed", while_it_is_opened)
    assert verify(uninterrupted).violations == ()


def test_refused_events_leave_no_rows(folder: Path, make: Callable[..., Trajectory]) -> None:
    refused = [LogEvent("before", ""), AttemptFinished(make(1)), LogEvent("after", "")]
    with closing(create_run(folder, {})) as writer:
        record_all(writer, [AttemptStarted(make(0).attempt, "train", 0)])
        before = read_digest(folder / "run.db")
        for events in (refused, [AttemptFinished(make(0)), AttemptFinished(make(0))]):
            with pytest.raises(Exception, match="constraint failed"):
                record_all(writer, events)
        assert read_digest(folder / "run.db") == before


UNUSUAL: dict[str, Callable[[Trajectory], list[Event]]] = {
    "numbers": lambda t: [StepMetrics(1, {"a": -0.0, "b": math.inf, "c": math.nan, "d": 1e-320, "e": True})],
    "texts": lambda t: [LogEvent("\ud800 \0 \n é \U0001f389", '"quoted\\" x')],
    "rewards": lambda t: [AttemptFinished(replace(t, rewards={"a": (0.5,) * 3, "b": True, "c": None, "d": -math.inf}))],
    "no turns": lambda t: [AttemptFinished(replace(t, turns=(), rewards={}, seconds=3))],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_values_do_not_count_as_changed(name: str, folder: Path, make: Callable[..., Trajectory]) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, [AttemptStarted(make(0).attempt, "train", 0), *UNUSUAL[name](make(0))])
    assert not [line for line in verify(folder).violations if line.startswith("rows")]


def test_every_table_is_in_the_digest(uninterrupted: Path) -> None:
    with closing(sqlite3.connect(uninterrupted / "run.db")) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == set(TABLE_NAMES)
    digest = read_digest(uninterrupted / "run.db")
    assert digest is not None and all(table.rows for table in digest.tables.values())
