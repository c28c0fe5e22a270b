"""A valid run verifies; each invariant that is broken alone is the one reported, and no change of a row is missed."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded_runs import record_all, save

from agent_r1.commands.recorded_run import verify as verify_command
from agent_r1.core.events import AttemptFinished, AttemptStarted, CheckpointSaved
from agent_r1.store import invariants as file_invariants, reader, verification
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.invariants import INVARIANTS
from agent_r1.store.manifest import DIGEST_FILE, Manifest, check_manifest
from agent_r1.store.rows import TurnTokens, pack_columns, pack_document, unpack_document
from agent_r1.store.verification import FILE_INVARIANTS, verify

Break = Callable[[Path], object]


def test_an_uninterrupted_run_is_valid(uninterrupted: Path) -> None:
    report = verify(uninterrupted)
    assert report.violations == () and report.is_valid
    assert report.attempts == {"trained": 6, "dropped": 6, "superseded": 0, "pending": 0}
    assert (report.segments, report.steps, report.checkpoints) == (1, 4, 0)


def test_a_resumed_run_is_valid_and_counts_superseded_attempts(resumed: Path) -> None:
    report = verify(resumed)
    assert report.violations == ()
    assert report.attempts == {"trained": 6, "dropped": 6, "superseded": 3 + 1 + 1 + 1, "pending": 0}
    assert (report.segments, report.steps, report.checkpoints) == (2, 4, 1)


def test_a_run_that_stopped_may_leave_attempts_pending(folder: Path, script: Any) -> None:
    with closing(create_run(folder, {})) as writer:
        record_all(writer, script.start(), *script.step(1), script.sampling(2))
    report = verify(folder)
    assert report.violations == () and report.attempts["pending"] == 3


def test_a_run_without_events_is_valid(folder: Path) -> None:
    create_run(folder, {}).close()
    assert verify(folder).is_valid


@pytest.mark.parametrize("numbers", [3, 2])
def test_a_reward_per_turn_may_omit_summary_turns(numbers: int, folder: Path, script: Any) -> None:
    trajectory = script.trajectory(1, 0)
    turns = (trajectory.turns[0], replace(trajectory.turns[1], kind="summary"), trajectory.turns[2])
    kinds = [turn.kind for turn in trajectory.turns]
    trajectory = replace(trajectory, turns=turns, rewards={"steps": (0.5,) * numbers})
    with closing(create_run(folder, {})) as writer:
        record_all(
            writer, script.start(), [AttemptStarted(trajectory.attempt, "train", 0), AttemptFinished(trajectory)]
        )
    assert set(kinds) == {"act"} and verify(folder).is_valid


def test_metrics_that_follow_from_the_attempts_are_valid(resumed: Path, no_digests: None) -> None:
    values = {"out_of_turns": 2, "tokens": 12, "reward/exact_match": 1.5, "reward/judge": 0.0}
    rows = ", ".join(f"({990 + n}, 1, 1, '{name}', {value}, 1)" for n, (name, value) in enumerate(values.items()))
    change(resumed, f"INSERT INTO metrics VALUES {rows}")
    assert verify(resumed).violations == ()


def change(folder: Path, *statements: str, parameters: Sequence[object] = ()) -> None:
    """Change the database without its foreign keys."""
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            assert connection.execute(statement, parameters).rowcount != 0, f"nothing was changed by {statement}"


def sql(*statements: str) -> Break:
    return lambda folder: change(folder, *statements)


FIRST = "(SELECT min(id) FROM attempts)"


def the(step: int, index: int, segment: int = 1) -> str:
    """Return SQL for the row id of an attempt."""
    return f"(SELECT id FROM attempts WHERE group_id = {step - 1} AND sample_index = {index} AND segment = {segment})"


OF_TURNS = ("rewards", "token_records")
"""The tables whose rows refer to turns."""


def with_token_record(columns: list[tuple[float, ...]]) -> Break:
    """Replace the token record of the first turn of the first attempt."""

    def breaking(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            statement = f"UPDATE token_records SET numbers = ? WHERE attempt_id = {FIRST} AND turn = 0"
            assert connection.execute(statement, (pack_columns(columns),)).rowcount == 1

    return breaking


def with_tokens(edit: Callable[[TurnTokens], TurnTokens]) -> Break:
    """Edit the tokens of the first turn of the first attempt."""

    def breaking(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            [blob] = connection.execute(f"SELECT tokens FROM turns WHERE attempt_id = {FIRST} AND turn = 0").fetchone()
            packed = edit(TurnTokens.unpack(blob)).pack()
            connection.execute(f"UPDATE turns SET tokens = ? WHERE attempt_id = {FIRST} AND turn = 0", (packed,))

    return breaking


def with_spans(version_spans: list[list[int]]) -> Break:
    def breaking(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            [blob] = connection.execute(f"SELECT content FROM turns WHERE attempt_id = {FIRST} AND turn = 0").fetchone()
            content = unpack_document(blob)
            content[3] = version_spans
            connection.execute(
                f"UPDATE turns SET content = ? WHERE attempt_id = {FIRST} AND turn = 0", (pack_document(content),)
            )

    return breaking


def flip_bit(name: str) -> Break:
    """Change one bit of a file."""

    def breaking(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[0] ^= 1
        (folder / name).write_bytes(data)

    return breaking


def other_steps(folder: Path) -> None:
    change(folder, "UPDATE segments SET config = '{\"steps\": 7}' WHERE segment = 2")


def other_weights(name: str) -> Break:
    """Save weights that the database does not know."""
    return lambda folder: save(folder, name, "weights from elsewhere", None)


def without_the_last_checkpoint(folder: Path) -> None:
    """Remove the newest checkpoint of a run without a final model."""
    change(folder, "INSERT INTO events VALUES (999, 2, 0, 'checkpoint_saved', '4')")
    shutil.rmtree(folder / "model")


def torn_page(folder: Path) -> None:
    with (folder / "run.db").open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\0" * 4096)


BROKEN: dict[str, list[Break]] = {
    "each attempt has one current row": [
        sql(
            f"UPDATE attempts SET attempt = (SELECT attempt FROM attempts WHERE id = {FIRST}) WHERE id = {the(3, 0, 2)}"
        )
    ],
    "a fate is trained, dropped or superseded": [
        sql("UPDATE fates SET fate = 'lost' WHERE reason = 'the engine failed'")
    ],
    "a superseded attempt gets no later fate": [
        sql(
            "INSERT INTO segments VALUES (998, 3, 4, 0, '{}')",
            f"INSERT INTO fates VALUES (999, {the(4, 0)}, 3, 'trained', 4, NULL, NULL)",
        )
    ],
    "only a later segment supersedes": [sql("UPDATE fates SET segment = 1 WHERE reason = 'it was started again'")],
    "an attempt gets its fate after its start": [
        sql(f"UPDATE fates SET segment = 1, step = 2 WHERE attempt_id = {the(3, 2, 2)}")
    ],
    "fates after a checkpoint are superseded": [
        sql("DELETE FROM fates WHERE segment = 2 AND attempt_id = (SELECT id FROM attempts WHERE task = 'stray')")
    ],
    "an attempt that is not trained has a reason": [
        sql("UPDATE fates SET reason = NULL WHERE reason = 'the engine failed'"),
        sql("UPDATE fates SET reason = ' ' WHERE reason = 'it was started again'"),
    ],
    "a trained attempt has finished": [
        sql(*(f"DELETE FROM {table} WHERE attempt_id = {FIRST}" for table in (*OF_TURNS, "turns", "outcomes")))
    ],
    "a trained attempt has action tokens": [
        sql(
            *(f"DELETE FROM {table} WHERE attempt_id = {FIRST}" for table in (*OF_TURNS, "turns")),
            "UPDATE outcomes SET newest_version = -1, turns = 0, action_tokens = 0, calls = 0, call_errors = 0,"
            f" reward = 0 WHERE attempt_id = {FIRST}",
        )
    ],
    "an attempt with token records has a fate": [
        sql(
            "UPDATE events SET kind = 'stopped' WHERE kind = 'completed'",
            f"DELETE FROM fates WHERE attempt_id = {FIRST}",
        )
    ],
    "a completed run has no pending attempts": [sql(f"DELETE FROM fates WHERE attempt_id = {the(4, 2, 2)}")],
    "segments are numbered in order": [sql("UPDATE segments SET step = 1 WHERE segment = 1")],
    "every step has metrics": [sql("UPDATE fates SET step = 1 WHERE step = 2", "DELETE FROM metrics WHERE step = 2")],
    "the step of a fate has metrics": [
        sql(f"UPDATE fates SET step = 99 WHERE attempt_id = {the(4, 2, 2)}"),
        sql(f"UPDATE fates SET step = 0 WHERE attempt_id = {the(4, 2, 2)}"),
    ],
    "a completed run took all its steps": [other_steps],
    "versions count up from 0": [
        sql("UPDATE versions SET version = 7 WHERE step = 4"),
        sql("DELETE FROM versions WHERE step = 3 AND segment = 2"),
    ],
    "the step of a version has metrics": [sql("UPDATE versions SET step = 99 WHERE step = 4")],
    "attempts use published versions": [
        sql(f"UPDATE attempts SET version = 99 WHERE id = {the(4, 2, 2)}"),
        sql(f"UPDATE attempts SET version = 2 WHERE id = {the(3, 0, 2)}"),
    ],
    "the statuses of a step are those of its attempts": [
        sql("INSERT INTO metrics VALUES (999, 1, 1, 'out_of_turns', 3, 1)"),
        sql("INSERT INTO metrics VALUES (999, 1, 1, 'out_of_turns', NULL, 1)"),
        sql("INSERT INTO metrics VALUES (999, 1, 1, 'engine_failed', 5, 1)"),
    ],
    "the tokens of a step are those of its attempts": [sql("INSERT INTO metrics VALUES (999, 1, 1, 'tokens', 11, 1)")],
    "the mean total of a step is that of its attempts": [
        sql(
            "DELETE FROM rewards WHERE name <> 'exact_match'",
            "UPDATE outcomes SET reward = (SELECT value FROM rewards WHERE attempt_id = outcomes.attempt_id)",
            "INSERT INTO metrics VALUES (999, 1, 1, 'reward', 9, 1)",
        )
    ],
    "the mean rewards of a step are those of its attempts": [
        sql("INSERT INTO metrics VALUES (999, 1, 1, 'reward/exact_match', 1.6, 1)")
    ],
    "an attempt is sampled before it is trained": [sql(f"UPDATE fates SET step = 1 WHERE attempt_id = {the(4, 1)}")],
    "turns": [
        with_tokens(lambda tokens: tokens._replace(logprobs=tokens.logprobs[:-1])),
        with_tokens(lambda tokens: tokens._replace(logprobs=(float("nan"), *tokens.logprobs[1:]))),
        with_spans([]),
        with_spans([[1, 0]]),
        with_spans([[0, 0], [2, 0]]),
        sql(f"UPDATE turns SET tokens = x'00' WHERE attempt_id = {FIRST} AND turn = 1"),
        sql(f"UPDATE turns SET content = x'00' WHERE attempt_id = {FIRST} AND turn = 1"),
        sql(f"UPDATE turns SET parent = 2 WHERE attempt_id = {FIRST} AND turn = 1"),
        sql(*(f"DELETE FROM {table} WHERE attempt_id = {FIRST} AND turn = 1" for table in (*OF_TURNS, "turns"))),
        *(
            sql(f"UPDATE outcomes SET {name} = {name} + 1 WHERE attempt_id = {FIRST}")
            for name in ("turns", "action_tokens", "calls", "call_errors")
        ),
        with_token_record([(0.5, 0.5, 0.5)] * 4),
        sql(f"UPDATE token_records SET numbers = x'00' WHERE attempt_id = {FIRST} AND turn = 1"),
        sql(f"UPDATE outcomes SET start = x'00' WHERE attempt_id = {FIRST}"),
        sql(f"UPDATE outcomes SET newest_version = 2 WHERE attempt_id = {the(2, 0)}"),
        sql(f"UPDATE rewards SET value = '[0.5]' WHERE attempt_id = {FIRST} AND name = 'steps'"),
        sql(f"UPDATE outcomes SET reward = 99 WHERE attempt_id = {FIRST}"),
        sql(f"UPDATE fates SET credit = 99 WHERE attempt_id = {FIRST}"),
    ],
    "each reward is recorded once": [
        sql(
            "INSERT INTO rewards SELECT 999, attempt_id, turn, call, name, value FROM rewards"
            f" WHERE attempt_id = {FIRST} AND name = 'judge'"
        ),
    ],
    "checkpoints": [
        flip_bit("checkpoints/step-2/model.safetensors"),
        flip_bit("checkpoints/step-2/manifest.json"),
        lambda folder: (folder / "checkpoints/step-2/more").write_text("more", "utf-8"),
        other_weights("checkpoints/step-2"),
        lambda folder: (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-4"),
        lambda folder: (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-5"),
    ],
    "newest checkpoint": [without_the_last_checkpoint],
    "model": [
        flip_bit("model/model.safetensors"),
        lambda folder: (folder / "model/manifest.json").unlink(),
        other_weights("model"),
    ],
    "rows": [flip_bit(DIGEST_FILE)],
    "configuration": [flip_bit("config.json"), lambda folder: (folder / "config.json").unlink()],
    "database": [
        torn_page,
        flip_bit("run.db"),
        sql(f"DELETE FROM attempts WHERE id = {FIRST}"),
        sql(f"DELETE FROM turns WHERE attempt_id = {FIRST} AND turn = 1"),
    ],
    "schema": [
        sql("DROP INDEX one_fate_per_attempt"),
        sql("DROP TRIGGER no_restart_after_fate"),
        sql("CREATE TABLE more (value)"),
    ],
}
CASES = [pytest.param(rule, breaking, id=f"{rule} {n}") for rule, b in BROKEN.items() for n, breaking in enumerate(b)]


@pytest.fixture
def no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_invariants, "check_closed", lambda connection, content: [])
    monkeypatch.setattr(reader, "changed_tables", lambda connection, recorded: [])


@pytest.mark.parametrize(("name", "breaking"), CASES)
def test_a_broken_invariant_is_the_one_reported(
    name: str, breaking: Break, resumed: Path, request: pytest.FixtureRequest
) -> None:
    breaking(resumed)
    if name != "rows":
        request.getfixturevalue("no_digests")
    assert rules(resumed) == [name]
    assert "\n" not in verify(resumed).violations[0]


def rules(folder: Path) -> list[str]:
    """Return the names of the invariants that do not hold."""
    return [line.partition(": ")[0] for line in verify(folder).violations]


def test_every_invariant_has_been_broken() -> None:
    assert set(BROKEN) == {*INVARIANTS, *FILE_INVARIANTS, "schema", "database", "turns"}


@pytest.mark.usefixtures("no_digests")
def test_a_violation_names_the_first_offender_and_counts_the_others(resumed: Path) -> None:
    change(resumed, "UPDATE fates SET reason = NULL WHERE reason = 'the engine failed'")
    [line] = verify(resumed).violations
    assert line.endswith("demo:0.2.0:style-a/0 was dropped without a reason (and 4 more)")


def test_a_checkpoint_removed_during_the_check_is_no_violation(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_it_is_removed(folder: Path) -> Manifest:
        shutil.rmtree(resumed / "checkpoints" / "step-2", ignore_errors=True)
        return check_manifest(folder)

    monkeypatch.setattr(file_invariants, "check_manifest", while_it_is_removed)
    assert verify(resumed).violations == ()


def test_a_checkpoint_saved_during_the_check_is_no_violation(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_it_saves(connection: sqlite3.Connection) -> Iterator[str]:
        shutil.copytree(resumed / "checkpoints" / "step-2", resumed / "checkpoints" / "step-9", dirs_exist_ok=True)
        return iter(())

    monkeypatch.setattr(verification, "damaged_pages", while_it_saves)
    assert verify(resumed).violations == ()
    assert [line.partition(": ")[0] for line in verify(resumed).violations] == ["checkpoints"]


def test_a_model_replaced_during_the_check_is_not_judged(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_it_is_replaced(connection: sqlite3.Connection) -> Iterator[str]:
        shutil.copytree(resumed / "model", resumed / "new")
        save(resumed, "new", "weights from elsewhere", None)
        (resumed / "model").rename(resumed / "old")
        (resumed / "new").rename(resumed / "model")
        return iter(())

    with monkeypatch.context() as patch:
        patch.setattr(verification, "damaged_pages", while_it_is_replaced)
        assert verify(resumed).violations == ()
    assert [line.partition(": ")[0] for line in verify(resumed).violations] == ["model"]


@pytest.mark.usefixtures("no_digests")
def test_an_incomplete_run_may_have_the_model_of_an_earlier_end(resumed: Path) -> None:
    other_weights("model")(resumed)
    change(resumed, "UPDATE versions SET checksum = 'weights from elsewhere' WHERE segment = 1 AND step = 3")
    assert verify(resumed).violations != ()
    change(resumed, "UPDATE events SET kind = 'stopped' WHERE kind = 'completed'")
    assert verify(resumed).violations == ()


def test_a_completed_run_needs_no_checkpoint_beside_its_model(resumed: Path, script: Any) -> None:
    with closing(reopen_run(resumed)) as writer:
        record_all(writer, [CheckpointSaved(4)])
    shutil.rmtree(resumed / "checkpoints")
    assert verify(resumed).is_valid


def test_verifying_changes_nothing(resumed: Path) -> None:
    before = {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()}
    verify(resumed)
    assert {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()} == before


def test_a_complete_run_without_a_digest_is_valid_with_a_warning(uninterrupted: Path) -> None:
    assert verify(uninterrupted).warnings == ()
    (uninterrupted / DIGEST_FILE).unlink()
    report = verify(uninterrupted)
    assert report.is_valid and report.not_closed > 0
    [line] = report.warnings
    assert f"covers its last {report.not_closed} rows" in line
    result = CliRunner().invoke(verify_command, [str(uninterrupted)])
    assert f"warning: {line}\n" in result.stderr and report.rows_sha256 in result.stdout
