"""``agent-r1 init``: the project that it writes is tested and trained as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "towns", "--json"]) == 0
    files = ["README.md", "agent.py", "test_agent.py", "train.toml"]
    assert json.loads(capfd.readouterr().out) == {"folder": "towns", "files": files}
    assert sorted(path.name for path in (tmp_path / "towns").iterdir()) == files
    monkeypatch.chdir("towns")
    return tmp_path / "towns"


def test_the_test_of_a_new_project_passes(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_a_new_project_learns_with_its_own_settings(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Three seeds reached 1.00; before training the model answers 0.13 of the questions.
    arguments = ["--checkpoint_every", "0", "--run", "towns", "--quiet", "--json"]
    assert main(["train", "agent.py", "--config", "train.toml", *arguments]) == 0
    table = json.loads(capfd.readouterr().out.splitlines()[-1])["table"]
    assert table["trained"]["test"]["n"] >= 50
    assert table["trained"]["test"]["em"] >= 0.8 > 0.5 > table["base-tool-call"]["test"]["em"]


def test_existing_folders_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path, tmp_path / "link"):
        assert main(["init", str(folder)]) == 2
        error = capfd.readouterr().err
        assert error == f"agent-r1: NAME: got {folder}, which exists; give the name of a new folder\n"
    (tmp_path / "file").write_text("", "utf-8")
    assert main(["init", str(tmp_path / "file" / "towns")]) == 2
    reason = f"{tmp_path / 'file' / 'towns'}: Not a directory; give a folder that can be written"
    assert capfd.readouterr().err == f"agent-r1: NAME: got {reason}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
