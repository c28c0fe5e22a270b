"""A run that is whole is proved so; each rule, broken by itself, is the one that is named."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

import agent_r1.store.verify as verifying
from agent_r1.core.errors import InvalidInput
from agent_r1.store import create_run
from agent_r1.store import file_invariants as saved
from agent_r1.store.compression import Tokens, pack_document, unpack_document
from agent_r1.store.invariants import LAW
from agent_r1.store.manifest import Identity, Manifest, check_whole, write_manifest
from agent_r1.store.verify import FILE_RULES, verify

Break = Callable[[Path], object]


def test_a_run_that_never_stopped_holds(uninterrupted: Path) -> None:
    verdict = verify(uninterrupted)
    assert verdict.violations == () and verdict.holds
    assert verdict.attempts == {"trained": 6, "dropped": 6, "superseded": 0, "pending": 0}
    assert (verdict.lineages, verdict.steps, verdict.checkpoints) == (1, 4, 0)


def test_a_resumed_run_holds_and_counts_what_was_superseded(resumed: Path) -> None:
    verdict = verify(resumed)
    assert verdict.violations == ()
    assert verdict.attempts == {"trained": 6, "dropped": 6, "superseded": 3 + 1 + 1 + 1, "pending": 0}
    assert (verdict.lineages, verdict.steps, verdict.checkpoints) == (2, 4, 1)


def test_a_run_that_stopped_may_leave_attempts_pending(uninterrupted: Path) -> None:
    change(
        uninterrupted, "DELETE FROM events", "DELETE FROM fates WHERE step = 4", "DELETE FROM metrics WHERE step = 4"
    )
    change(uninterrupted, "DELETE FROM versions WHERE step = 4")
    verdict = verify(uninterrupted)
    assert verdict.violations == () and verdict.attempts["pending"] == 3


def test_a_run_that_has_only_begun_holds(folder: Path) -> None:
    create_run(folder, {}).close()
    assert verify(folder).holds


def test_where_there_is_no_run_the_input_is_bad(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no run\.db"):
        verify(tmp_path)


def test_a_run_of_a_newer_schema_is_refused(uninterrupted: Path) -> None:
    change(uninterrupted, "UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(InvalidInput, match="of schema 99, which is newer; read it with the agent-r1 that wrote it"):
        verify(uninterrupted)


def test_a_run_of_an_older_schema_is_refused(uninterrupted: Path) -> None:
    change(uninterrupted, "UPDATE meta SET value = '1' WHERE key = 'schema'")
    with pytest.raises(InvalidInput, match=r"of schema 1, which is older; .* runs are not converted"):
        verify(uninterrupted)


def test_a_reward_per_turn_may_leave_out_the_turns_of_a_summary(uninterrupted: Path) -> None:
    change(uninterrupted, "UPDATE turns SET kind = 'summary' WHERE attempt_id = 1 AND turn = 1")
    assert verify(uninterrupted).holds
    change(uninterrupted, "UPDATE rewards SET value = '[0.5, 0.5]' WHERE attempt_id = 1 AND name = 'steps'")
    assert verify(uninterrupted).holds


def change(folder: Path, *statements: str, parameters: Sequence[object] = ()) -> None:
    """Break the database as nothing that keeps its rules could."""
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            assert connection.execute(statement, parameters).rowcount != 0, f"nothing was changed by {statement}"


def sql(*statements: str) -> Break:
    return lambda folder: change(folder, *statements)


def the(step: int, member: int, lineage: int = 1) -> str:
    """The row of an attempt."""
    return f"(SELECT id FROM attempts WHERE group_serial = {step - 1} AND member = {member} AND lineage = {lineage})"


def with_tokens(edit: Callable[[Tokens], Tokens]) -> Break:
    """Edit the tokens of the first turn of the first attempt."""

    def breaking(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            [blob] = connection.execute("SELECT tokens FROM turns WHERE attempt_id = 1 AND turn = 0").fetchone()
            packed = edit(Tokens.unpack(blob)).pack()
            connection.execute("UPDATE turns SET tokens = ? WHERE attempt_id = 1 AND turn = 0", (packed,))

    return breaking


def with_spans(version_spans: list[list[int]]) -> Break:
    def breaking(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
            [blob] = connection.execute("SELECT said FROM turns WHERE attempt_id = 1 AND turn = 0").fetchone()
            said = unpack_document(blob)
            said[3] = version_spans
            connection.execute("UPDATE turns SET said = ? WHERE attempt_id = 1 AND turn = 0", (pack_document(said),))

    return breaking


def scribble(name: str) -> Break:
    """Change one bit of a file."""

    def breaking(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[0] ^= 1
        (folder / name).write_bytes(data)

    return breaking


def other_steps(folder: Path) -> None:
    change(folder, "UPDATE lineages SET config = '{\"steps\": 7}' WHERE lineage = 2")


def other_weights(name: str) -> Break:
    """A folder that is whole, but holds what the ledger does not know."""

    def breaking(folder: Path) -> None:
        write_manifest(folder / name, Identity("a model", "a tokenizer", "a template", "weights from elsewhere"))

    return breaking


def without_the_last_checkpoint(folder: Path) -> None:
    """It was saved, and no model stands in for it."""
    change(folder, "INSERT INTO events VALUES (99, 2, 0, 'saved', '4')")
    shutil.rmtree(folder / "model")


def torn_page(folder: Path) -> None:
    with (folder / "run.db").open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\0" * 4096)


BROKEN: dict[str, list[Break]] = {
    "one attempt stands once": [
        sql(f"UPDATE attempts SET attempt = (SELECT attempt FROM attempts WHERE id = 1) WHERE id = {the(3, 0, 2)}")
    ],
    "a fate is trained, dropped or superseded": [
        sql("UPDATE fates SET fate = 'lost' WHERE reason = 'the engine failed'")
    ],
    "what is superseded stays so": [
        sql(
            "INSERT INTO lineages VALUES (3, 4, 0, '{}')",
            f"INSERT INTO fates VALUES ({the(4, 0)}, 3, 'trained', 4, NULL, NULL)",
        )
    ],
    "only a later lineage supersedes": [sql("UPDATE fates SET lineage = 1 WHERE reason = 'it was dispatched again'")],
    "no fate before its lineage": [sql(f"UPDATE fates SET lineage = 1, step = 2 WHERE attempt_id = {the(3, 2, 2)}")],
    "what came after a checkpoint is superseded": [
        sql("DELETE FROM fates WHERE lineage = 2 AND attempt_id = (SELECT id FROM attempts WHERE task = 'stray')")
    ],
    "what is not trained has a reason": [
        sql("UPDATE fates SET reason = NULL WHERE reason = 'the engine failed'"),
        sql("UPDATE fates SET reason = ' ' WHERE reason = 'it was dispatched again'"),
    ],
    "what is trained had finished": [
        sql(*(f"DELETE FROM {table} WHERE attempt_id = 1" for table in ("rewards", "turns", "outcomes")))
    ],
    "what is trained has action tokens": [
        sql(
            *(f"DELETE FROM {table} WHERE attempt_id = 1" for table in ("rewards", "turns")),
            "UPDATE outcomes SET newest_version = -1 WHERE attempt_id = 1",
        )
    ],
    "a completed run leaves nothing pending": [sql(f"DELETE FROM fates WHERE attempt_id = {the(4, 2, 2)}")],
    "lineages follow each other": [sql("UPDATE lineages SET step = 1 WHERE lineage = 1")],
    "every step is measured": [sql("UPDATE fates SET step = 1 WHERE step = 2", "DELETE FROM metrics WHERE step = 2")],
    "fates fall on measured steps": [
        sql(f"UPDATE fates SET step = 99 WHERE attempt_id = {the(4, 2, 2)}"),
        sql(f"UPDATE fates SET step = 0 WHERE attempt_id = {the(4, 2, 2)}"),
    ],
    "a completed run took all its steps": [other_steps],
    "versions count up from 0": [
        sql("UPDATE versions SET version = 7 WHERE step = 4"),
        sql("DELETE FROM versions WHERE step = 3 AND lineage = 2"),
    ],
    "versions fall on measured steps": [sql("UPDATE versions SET step = 99 WHERE step = 4")],
    "only known weights act": [
        sql(f"UPDATE attempts SET version = 99 WHERE id = {the(4, 2, 2)}"),
        sql(f"UPDATE attempts SET version = 2 WHERE id = {the(3, 0, 2)}"),
    ],
    "training follows acting": [sql(f"UPDATE fates SET step = 1 WHERE attempt_id = {the(4, 1)}")],
    "turns": [
        with_tokens(lambda tokens: tokens._replace(logprobs=tokens.logprobs[:-1])),
        with_tokens(lambda tokens: tokens._replace(logprobs=(float("nan"), *tokens.logprobs[1:]))),
        with_spans([]),
        with_spans([[1, 0]]),
        with_spans([[0, 0], [2, 0]]),
        sql("UPDATE turns SET tokens = x'00' WHERE attempt_id = 1 AND turn = 1"),
        sql("UPDATE turns SET said = x'00' WHERE attempt_id = 1 AND turn = 1"),
        sql("UPDATE turns SET parent = 2 WHERE attempt_id = 1 AND turn = 1"),
        sql("DELETE FROM rewards WHERE attempt_id = 1", "DELETE FROM turns WHERE attempt_id = 1 AND turn = 1"),
        sql("UPDATE outcomes SET newest_version = 2 WHERE attempt_id = 4"),
        sql("UPDATE rewards SET value = '[0.5]' WHERE attempt_id = 1 AND name = 'steps'"),
        sql("INSERT INTO rewards SELECT * FROM rewards WHERE attempt_id = 1 AND name = 'judge'"),
    ],
    "checkpoints": [
        scribble("checkpoints/step-2/model.safetensors"),
        scribble("checkpoints/step-2/manifest.json"),
        lambda folder: (folder / "checkpoints/step-2/more").write_text("more"),
        other_weights("checkpoints/step-2"),
        lambda folder: (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-4"),
        lambda folder: (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-5"),
    ],
    "newest checkpoint": [without_the_last_checkpoint],
    "model": [
        scribble("model/model.safetensors"),
        lambda folder: (folder / "model/manifest.json").unlink(),
        other_weights("model"),
    ],
    "configuration": [scribble("config.json"), lambda folder: (folder / "config.json").unlink()],
    "database": [
        torn_page,
        scribble("run.db"),
        sql("DELETE FROM attempts WHERE id = 1"),
        sql("DELETE FROM turns WHERE attempt_id = 1 AND turn = 1"),
        sql("DROP INDEX settled_once"),
        sql("CREATE TABLE more (value)"),
    ],
}
CASES = [pytest.param(rule, breaking, id=f"{rule} {n}") for rule, b in BROKEN.items() for n, breaking in enumerate(b)]


@pytest.mark.parametrize(("rule", "breaking"), CASES)
def test_a_broken_rule_is_the_one_that_is_named(rule: str, breaking: Break, resumed: Path) -> None:
    breaking(resumed)
    verdict = verify(resumed)
    assert not verdict.holds and [line.partition(": ")[0] for line in verdict.violations] == [rule]
    assert "\n" not in verdict.violations[0]


def test_every_rule_has_been_broken() -> None:
    assert set(BROKEN) == {*LAW, *FILE_RULES, "database"}


def test_a_rule_names_its_first_offender_and_counts_the_others(resumed: Path) -> None:
    change(resumed, "UPDATE fates SET reason = NULL WHERE reason = 'the engine failed'")
    [line] = verify(resumed).violations
    assert line.endswith("demo:0.2.0:style-a/0 was dropped without one (and 4 more)")


def test_what_a_run_removes_meanwhile_is_no_damage(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_it_is_removed(folder: Path) -> Manifest:
        shutil.rmtree(resumed / "checkpoints" / "step-2", ignore_errors=True)
        return check_whole(folder)

    monkeypatch.setattr(saved, "check_whole", while_it_is_removed)
    assert verify(resumed).violations == ()


def test_what_a_run_saves_meanwhile_is_no_damage(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a step that the ledger, as it is seen, does not have yet."""

    def while_it_saves(connection: sqlite3.Connection) -> Iterator[str]:
        shutil.copytree(resumed / "checkpoints" / "step-2", resumed / "checkpoints" / "step-9", dirs_exist_ok=True)
        return iter(())

    monkeypatch.setattr(verifying, "_damage", while_it_saves)
    assert verify(resumed).violations == ()
    assert [line.partition(": ")[0] for line in verify(resumed).violations] == ["checkpoints"]


def test_a_model_that_is_replaced_meanwhile_is_not_judged(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_it_is_replaced(connection: sqlite3.Connection) -> Iterator[str]:
        shutil.copytree(resumed / "model", resumed / "new")
        other_weights("new")(resumed)
        (resumed / "model").rename(resumed / "old")
        (resumed / "new").rename(resumed / "model")
        return iter(())

    with monkeypatch.context() as patch:
        patch.setattr(verifying, "_damage", while_it_is_replaced)
        assert verify(resumed).violations == ()
    assert [line.partition(": ")[0] for line in verify(resumed).violations] == ["model"]


def test_until_it_is_complete_a_run_may_have_the_model_of_an_earlier_end(resumed: Path) -> None:
    other_weights("model")(resumed)
    change(resumed, "UPDATE versions SET digest = 'weights from elsewhere' WHERE lineage = 1 AND step = 3")
    assert verify(resumed).violations != ()
    change(resumed, "DELETE FROM events WHERE kind = 'completed'")
    assert verify(resumed).violations == ()


def test_a_complete_run_needs_its_model_alone(resumed: Path) -> None:
    change(resumed, "INSERT INTO events VALUES (99, 2, 0, 'saved', '4')")
    shutil.rmtree(resumed / "checkpoints")
    assert verify(resumed).holds


def test_verifying_changes_nothing(resumed: Path) -> None:
    before = {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()}
    verify(resumed)
    assert {path: path.read_bytes() for path in resumed.rglob("*") if path.is_file()} == before
