"""Every row is sealed with the rows before it: whatever is changed in a run's database is noticed, and named."""

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
from agent_r1.store import verification
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.ledger import Seal, compute_seal, read_latest_seal
from agent_r1.store.reader import RunReader
from agent_r1.store.schema import KEYS
from agent_r1.store.verification import run_digest, verify


def run_sql(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def first_violation(folder: Path) -> str:
    return verify(folder).violations[0]


ONE = "(SELECT min(id) FROM rewards WHERE name = 'format')"

CHANGES: dict[str, tuple[str, str]] = {
    "a changed number": (
        "UPDATE rewards SET value = value + 1 WHERE name = 'exact_match'",
        "in rewards (attempt 'demo:0.0.0:style-a/0', turn None, call None, name 'exact_match', after step 0) is not as",
    ),
    "a changed blob": (
        "UPDATE outcomes SET start = x'78' WHERE id = (SELECT max(id) FROM outcomes)",
        "in outcomes (attempt 'demo:3.1.0:style-a/3', after step 3) is not as it was recorded",
    ),
    "a changed text": (
        "UPDATE fates SET reason = 'another' WHERE step = 2 AND reason LIKE 'no advantage%'",
        "in fates (attempt 'demo:1.0.0:style-a/1', segment 1, after step 1) is not as it was recorded (and 1 more)",
    ),
    "another type with the same digits": (
        "UPDATE metrics SET value = 'NaN' WHERE step = 3 AND name = 'loss'",
        "in metrics (segment 1, step 3, name 'loss', after step 2) is not as it was recorded",
    ),
    "a float in place of an integer": (
        "UPDATE rewards SET value = CAST(value AS INTEGER) WHERE name = 'exact_match'",
        "name 'exact_match', after step 0) is not as it was recorded (and 7 more)",
    ),
    "a time": (
        "UPDATE segments SET time = time + 1",
        "in segments (segment 1, after step 0) is not as it was recorded",
    ),
    "a name of the run": (
        "UPDATE meta SET value = 'other' WHERE key = 'run'",
        "in meta (key 'run', after step 0) is not as it was recorded",
    ),
    "a seal": (
        "UPDATE events SET seal = zeroblob(16)",
        "in events (segment 1, kind 'completed', after step 4) is not as it was recorded",
    ),
    "a seal of another type": (
        "UPDATE events SET seal = 'text'",
        "in events (segment 1, kind 'completed', after step 4) is not as it was recorded",
    ),
    "swapped rows": (
        "UPDATE rewards SET value = CASE value WHEN 1.0 THEN 2.0 ELSE 1.0 END"
        " WHERE name = 'exact_match' AND attempt_id IN (SELECT id FROM attempts WHERE group_id = 0)",
        "in rewards (attempt 'demo:0.0.0:style-a/0', turn None, call None, name 'exact_match', after step 0) is not as",
    ),
    "a deleted row": (
        f"DELETE FROM rewards WHERE id = {ONE}",
        "is gone, before row",
    ),
    "all rows of the end deleted": (
        "DELETE FROM events",
        "is the last one and does not have the seal of the last one recorded",
    ),
    "an added row": (
        "INSERT INTO metrics SELECT 10000, seal, segment, step, 'more', 0.5, 1 FROM metrics WHERE step = 1 LIMIT 1",
        "row 10000, in metrics (segment 1, step 1, name 'more', after step 4)",
    ),
    "an added row with the number of another": (
        f"INSERT INTO metrics SELECT {ONE}, seal, segment, step, 'more', 0.5, 1 FROM metrics WHERE step = 1 LIMIT 1",
        "name 'more', after step 0) was added",
    ),
    "another head": ("UPDATE head SET row = row - 1", "does not have the seal of the last one recorded"),
    "no head": ("DELETE FROM head", "the table head does not hold one seal"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_row_that_does_not_fit_is_named(name: str, uninterrupted: Path) -> None:
    statement, message = CHANGES[name]
    run_sql(uninterrupted, statement)
    line = first_violation(uninterrupted)
    assert line.startswith("ledger: ") and message in line and "\n" not in line
    assert run_verify(uninterrupted) == 1


def test_text_that_cannot_be_decoded_is_shown_in_one_line(uninterrupted: Path) -> None:
    run_sql(uninterrupted, "UPDATE rewards SET name = CAST(x'e9ff0a' AS TEXT) WHERE name = 'judge'")
    assert "name '\\udce9\\udcff\\n'" in first_violation(uninterrupted)
    assert run_verify(uninterrupted) == 1


def test_a_truncated_database_is_noticed(uninterrupted: Path) -> None:
    size = (uninterrupted / "run.db").stat().st_size
    for length in (size - 4096, size // 2, 100, 0):
        os.truncate(uninterrupted / "run.db", length)
        assert run_verify(uninterrupted) == 1


def test_random_changes_of_the_database_are_noticed(resumed: Path) -> None:
    outcome = change_and_verify(resumed, Size(110, 0, 1))
    assert outcome.violations == () and outcome.counts["edits, noticed"] == 10
    assert outcome.counts["flips, value changed, noticed"] > 5  # about 20: most bits belong to free pages


def test_without_the_comparison_of_seals_changes_are_missed(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "broken_rows", lambda connection: iter(()))
    assert change_and_verify(resumed, Size(33, 0, 1)).violations != ()


def compute_all_seals_again(folder: Path) -> None:
    """Hide every change of the rows, as somebody who knows the algorithm can."""
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as connection:
        rows = [(table, *row) for table in KEYS for row in connection.execute(f"SELECT * FROM {table}")]
        seal = bytes(16)
        for table, row, _, *values in sorted(rows, key=lambda row: row[1]):
            seal = compute_seal(seal, table, row, values)
            connection.execute(f"UPDATE {table} SET seal = ? WHERE id = ?", (seal, row))
        connection.execute("UPDATE head SET seal = ?", (seal,))


def test_seals_that_were_computed_again_contradict_the_seals_outside_of_the_database(resumed: Path) -> None:
    compute_all_seals_again(resumed)
    assert verify(resumed).is_valid  # nothing was changed
    run_sql(resumed, "UPDATE outcomes SET seconds = seconds + 1")
    compute_all_seals_again(resumed)
    lines = verify(resumed).violations
    assert [line.partition(": ")[0] for line in lines] == ["checkpoints", "model", "seal"]
    assert all("does not fit the ledger: row" in line for line in lines)
    for name in ("checkpoints", "model"):
        shutil.rmtree(resumed / name)
    (resumed / "seal.json").unlink()
    assert verify(resumed).is_valid  # nothing is left that knew the rows


def test_an_older_copy_of_the_database_contradicts_the_checkpoint(folder: Path, script: Any) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1))
    shutil.copy(folder / "run.db", folder / "older.db")
    with closing(reopen_run(folder)) as writer:
        record_all(writer, script.sampling(2))
    (folder / "older.db").replace(folder / "run.db")
    [line] = verify(folder).violations
    assert line.startswith("seal: ") and line.endswith("was recorded and is gone")


def test_rows_after_the_last_seal_are_checked_and_counted_as_not_yet_closed(folder: Path, script: Any) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1))
    assert verify(folder).not_closed == 0
    with closing(reopen_run(folder)) as writer:
        record_all(writer, [LogEvent("one", "more")], [LogEvent("two", "more")])
        report = verify(folder)  # as after a kill: nothing was closed
    assert report.is_valid and report.not_closed == 2
    assert verify(folder).not_closed == 0


def test_a_resumed_run_continues_the_ledger(resumed: Path) -> None:
    before = read_latest_seal(resumed / "run.db")
    assert before is not None
    with closing(reopen_run(resumed)) as writer:
        writer.open_segment(2, {"steps": 4})
        record_all(writer, [LogEvent("resumed", "from step 2")])
    after = read_latest_seal(resumed / "run.db")
    report = verify(resumed)
    assert after is not None and after.row > before.row and report.is_valid
    assert (report.segments, report.rows, report.not_closed) == (3, after.row, 0)


def test_a_run_that_is_only_opened_gets_no_new_seal(resumed: Path) -> None:
    (resumed / "seal.json").unlink()
    reopen_run(resumed).close()
    assert not (resumed / "seal.json").exists()


def test_a_ledger_whose_end_is_damaged_is_not_continued(uninterrupted: Path) -> None:
    run_sql(uninterrupted, "DELETE FROM events")
    with pytest.raises(InvalidInput, match=r"which is damaged: row \d+ was recorded and is gone; put back a copy"):
        reopen_run(uninterrupted)


def test_refused_events_leave_no_gap(folder: Path, make: Callable[..., Trajectory]) -> None:
    refused = [LogEvent("before", ""), AttemptFinished(make(1)), LogEvent("after", "")]
    with closing(create_run(folder, {})) as writer:
        record_all(writer, [AttemptStarted(make(0).attempt, "train", 0)])
        for events in (refused, [AttemptFinished(make(0)), AttemptFinished(make(0))]):
            with pytest.raises(Exception, match="constraint failed"):
                record_all(writer, events)
        record_all(writer, [LogEvent("last", "words")])
        head = writer._ledger.head
    assert read_latest_seal(folder / "run.db") == head
    assert not [line for line in verify(folder).violations if line.startswith("ledger")]


UNUSUAL: dict[str, Callable[[Trajectory], list[Event]]] = {
    "seconds without a fraction": lambda t: [AttemptFinished(replace(t, seconds=3))],
    "numbers": lambda t: [StepMetrics(1, {"a": -0.0, "b": math.inf, "c": math.nan, "d": 1e-320, "e": True})],
    "texts": lambda t: [LogEvent("\ud800 \0 \n é \U0001f389", '"quoted\\" x')],
    "rewards": lambda t: [AttemptFinished(replace(t, rewards={"a": (0.5,) * 3, "b": True, "c": None, "d": -math.inf}))],
    "no turns": lambda t: [AttemptFinished(replace(t, turns=(), rewards={}))],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_values_are_read_back_as_they_were_sealed(
    name: str, folder: Path, make: Callable[..., Trajectory]
) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, [AttemptStarted(make(0).attempt, "train", 0), *UNUSUAL[name](make(0))])
    assert not [line for line in verify(folder).violations if line.startswith("ledger")]


def test_equal_runs_have_equal_digests_and_different_seals(runs: Path) -> None:
    def digest(folder: Path) -> str:
        with closing(RunReader(folder)) as reader:
            return run_digest(reader)

    one, other = runs / "uninterrupted", runs / "resumed"
    assert digest(one) == digest(other)
    assert read_latest_seal(one / "run.db") != read_latest_seal(other / "run.db")


def test_every_table_is_sealed(uninterrupted: Path) -> None:
    with closing(sqlite3.connect(uninterrupted / "run.db")) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {*KEYS, "head"}
        assert all(connection.execute(f"SELECT count(*) FROM {table}").fetchone() != (0,) for table in KEYS)


def test_a_seal_of_the_file_is_one_of_the_database(uninterrupted: Path) -> None:
    seal = Seal.from_json(json.loads((uninterrupted / "seal.json").read_text()))
    assert seal == read_latest_seal(uninterrupted / "run.db")
    assert seal.to_json() == {"row": seal.row, "seal": seal.value.hex()}
