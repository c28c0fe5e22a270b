"""A command finds the run that its argument names, and says the same in one line if there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent_r1.cli import main
from agent_r1.commands.command import find_run
from agent_r1.store.folder import create_run

COMMANDS = {"show": [], "verify": [], "export": ["out"], "view": []}


@pytest.fixture(autouse=True)
def in_a_folder_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo", "runs/both", "both", "here"):
        Path(name).parent.mkdir(exist_ok=True)
        create_run(Path(name), {}).close()
    Path("empty").mkdir()


@pytest.mark.parametrize(
    ("run", "folder"),
    [("demo", "runs/demo"), ("runs/demo", "runs/demo"), ("here", "here"), ("both", "runs/both"), ("./both", "both")],
)
def test_a_run_is_a_name_in_runs_or_a_folder(run: str, folder: str) -> None:
    assert find_run(run) == Path(folder)


@pytest.mark.parametrize("arguments", [[], ["runs"]])
def test_show_without_a_run_lists_the_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    os.utime("runs/both/run.db", (2e9, 2e9))
    assert main(["show", *arguments]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "task", "set", "step", "reward", "changed"]
    assert [row.split()[0] for row in rows] == ["both", "demo"]
    assert main(["show", *arguments, "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)["runs"]
    assert first["run"] == "runs/both" and (first["step"], first["reward"]) == (0, None)


def test_show_without_a_run_and_without_runs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["show"]) == 2
    assert "run: got runs/, but there is no folder runs; give the name" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("run", "line"),
    [
        ("demi", "demi, but there is no folder runs/demi; did you mean 'demo'? give the name of a run in runs/"),
        ("./nothing", "./nothing, but there is no folder nothing; give the name of a run in runs/"),
        ("empty", "empty, but empty holds no run; give the name of a run in runs/, or the folder of one"),
    ],
)
def test_a_name_without_a_run_is_one_line(
    command: str, run: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, run, *COMMANDS[command]]) == 2
    assert f"run: got {line}" in capsys.readouterr().err
