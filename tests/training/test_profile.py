"""`agent-r1 train --profile`: tables of where the time of a step goes, which change no result of the run."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from scenarios import MICRO, micro_taskset

from agent_r1.cli import main
from agent_r1.config import Layer, resolve
from agent_r1.core.profile import PARTS, SECONDS
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train


class Lines(SilentProgress):
    """A progress display that keeps the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def train_micro(folder: Path, every: int) -> list[str]:
    """Train for two steps; return the printed lines."""
    settings = {**MICRO, "steps": 2, "evaluate_every": 2, "algorithm": "ppo", "profile": every, "run": str(folder)}
    taskset, lines = micro_taskset(), Lines()
    train(resolve(TrainConfig, [Layer("test", settings), Layer("recipe", taskset.recipe)]), taskset, lines)
    return lines.lines


def test_a_profiled_run_has_tables_and_the_results_of_any_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, profiled = train_micro(tmp_path / "plain", 0), train_micro(tmp_path / "profiled", 1)
    tables = [line for line in profiled if line.startswith("time of a step")]
    assert [table.splitlines()[0].split(", ")[1][:9] for table in tables] == ["mean of 1", "mean of 2"]
    assert not any(line.startswith("time of a step") for line in plain)

    with closing(RunReader(tmp_path / "plain")) as one, closing(RunReader(tmp_path / "profiled")) as other:
        assert run_digest(one) == run_digest(other)
        assert not any(name.startswith("profile") for name in one.metric_names())
        steps = [step.values for step in other.metrics()]
        walls = [sum(v for k, v in step.values.items() if k.endswith("_seconds")) for step in other.metrics()]
    measured = {part for part in PARTS if steps[1][SECONDS + part] > 0}
    assert measured >= set(PARTS) - {"servers", "ranks", "waiting"}
    for step, wall in zip(steps, walls, strict=True):  # another clock, read at nearly the same time
        assert wall / 2 < sum(step[SECONDS + part] for part in PARTS) < 2 * wall

    assert main(["show", str(tmp_path / "profiled")]) == 0
    assert "Time of a step" in (shown := capsys.readouterr().out) and "backward" in shown
    assert main(["show", str(tmp_path / "profiled"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["profile"]
    assert report["backward"]["seconds"] == pytest.approx(sum(step["profile/backward"] for step in steps) / 2)
    assert main(["show", str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == {}


def test_a_large_model_on_one_of_several_cores_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    note = "note: one of 8 cores computes; --threads 8 is faster, and rounds otherwise"
    assert note not in train_micro(tmp_path / "small", 0)
    monkeypatch.setattr(run, "LARGE_MODEL", 0)
    assert note in train_micro(tmp_path / "large", 0)
