"""The examples in docs/adapters.md are complete files that load, and one of them trains."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from preloaded import run_python

from agent_r1.training.user_task import load_task_file

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "adapters.md").read_text()
EXAMPLES = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE))
PACKAGES = {
    "TextArena": "textarena",
    "Gymnasium": "gymnasium",
    "reasoning-gym": "reasoning_gym",
    "MCP": "mcp",
    "OpenEnv": "openenv",
}


def write_example(folder: Path, heading: str) -> Path:
    if find_spec(PACKAGES[heading]) is None:
        pytest.skip(f"{PACKAGES[heading]} is not installed")
    file = folder / "example.py"
    file.write_text(EXAMPLES[heading])
    return file


def test_every_adapter_has_an_example() -> None:
    assert set(EXAMPLES) == set(PACKAGES)


@pytest.mark.parametrize("heading", PACKAGES)
def test_an_example_is_a_task_set(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    taskset = load_task_file(write_example(tmp_path, heading), "a/model")
    assert taskset.tasks("train") and taskset.scorers
    assert bool(taskset.env.tools) == (heading == "MCP")


def test_an_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", "agent_r1.cli", "train", str(write_example(tmp_path, "Gymnasium"))]
    options = [
        "--steps",
        "1",
        "--groups-per-step",
        "2",
        "--group-size",
        "4",
        "--evaluate-n",
        "2",
        "--model",
        "tiny-base",
    ]
    run = ["--run", str(tmp_path / "run"), "--json", "--quiet"]
    done = run_python(*command, *options, *run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
