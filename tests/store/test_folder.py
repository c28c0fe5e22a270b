"""The folder of a run is created completely or not at all, and never twice."""

import json
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.store.folder import create_run, default_run_name, reopen_run, run_folder
from agent_r1.store.reader import RunReader
from agent_r1.store.schema import SCHEMA_VERSION


def test_the_configuration_is_stored_in_a_file_and_in_the_database(folder: Path) -> None:
    config = {"task": "tinywiki", "trainer": {"learning_rate": 1e-3}, "betas": [0.9, 0.95]}
    create_run(folder, config).close()
    assert json.loads((folder / "config.json").read_text("utf-8")) == config
    with closing(RunReader(folder)) as reader:
        assert reader.config() == config


def test_a_folder_that_exists_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    with pytest.raises(InvalidInput, match="exists; give another --run"):
        create_run(folder, {})
    assert list(folder.parent.iterdir()) == [folder] and list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_invalid_input(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be", "utf-8")
    with pytest.raises(InvalidInput, match="give a --run in a folder that can be written"):
        create_run(tmp_path / "runs" / "demo", {})


@pytest.mark.parametrize("step", ["write_text", "rename"])
def test_a_failure_during_creation_leaves_nothing(step: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"write_text": (Path, "write_text"), "rename": ("os.rename",)}[step], fail)
    with pytest.raises(InvalidInput, match="No space left"):
        create_run(folder, {})
    assert list(folder.parent.iterdir()) == []


def test_reading_a_finished_run_leaves_no_files(folder: Path) -> None:
    create_run(folder, {}).close()
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == []
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "digest.json", "run.db"]


def test_a_run_is_closed_at_once_while_it_is_read(folder: Path) -> None:
    writer = create_run(folder, {})
    with closing(RunReader(folder)) as reader:
        assert list(reader.events()) == []
        began = time.monotonic()
        writer.close()
        assert time.monotonic() - began < 4.5  # SQLite would wait 5 s for the reader
        assert reader.config() == {}


def test_a_newer_schema_is_refused(folder: Path) -> None:
    create_run(folder, {}).close()
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA_VERSION + 1,))
    with pytest.raises(InvalidInput, match=f"of schema {SCHEMA_VERSION + 1}, which is newer; read it with"):
        RunReader(folder)


def test_an_older_schema_is_refused_in_one_line_that_says_what_to_do(folder: Path) -> None:
    create_run(folder, {}).close()
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (SCHEMA_VERSION - 1,))
    for open_run in (RunReader, reopen_run):
        with pytest.raises(InvalidInput) as refused:
            open_run(folder)
        assert f"of schema {SCHEMA_VERSION - 1}, which is older; read it with the agent-r1" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds no run\.db"):
        RunReader(tmp_path)
    (tmp_path / "run.db").write_text("not a database at all, " * 100, "utf-8")
    with pytest.raises(InvalidInput, match="file is not a database"):
        RunReader(tmp_path)
    (tmp_path / "run.db").write_bytes(b"")
    with pytest.raises(InvalidInput, match="no such table"):
        RunReader(tmp_path)


def test_default_names_and_folders_of_runs() -> None:
    for name in ("tinywiki", "task_sets/tinywiki.toml"):
        assert default_run_name(name, "ppo", datetime(2026, 1, 2, 3, 4, 5)) == "tinywiki-ppo-20260102-030405"
    assert run_folder("demo") == Path("runs/demo")
    assert run_folder("/tmp/demo") == Path("/tmp/demo")
    assert run_folder("./demo") == Path("demo")
