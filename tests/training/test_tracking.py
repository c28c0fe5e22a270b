"""Training with trackers has the bits of training without them, also if every tracker fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from micro_run import result_of
from resuming import config_of

from agent_r1.config import Layer
from agent_r1.core.taskset import TaskSet
from agent_r1.store.reader import RunReader, read_results, read_tools
from agent_r1.trackers import TrackedRun, Tracker
from agent_r1.training import run
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import resolve_resume_config

SHORT = {"steps": 2, "algorithm": "grpo", "groups_per_step": 1, "evaluate_every": 1, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def plain(micro: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.train(config_of(micro, tmp_path_factory.mktemp("plain") / "run", SHORT), micro, SilentProgress()).run


class Lines(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


class Raising:
    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")


def hang(run: TrackedRun) -> Tracker:
    threading.Event().wait()
    raise AssertionError


def test_failing_trackers_change_no_bit_of_a_run_and_are_reported_once(
    micro: TaskSet, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.trackers.HANG_SECONDS", 0.05)
    trackers = {"wandb": lambda run: Raising(), "mlflow": hang}
    monkeypatch.setattr("agent_r1.trackers.TRACKERS", trackers)
    monkeypatch.setattr(run, "require_trackers", lambda names: None)
    progress = Lines()
    run.train(config_of(micro, tmp_path / "tracked", {**SHORT, "track": ("wandb", "mlflow")}), micro, progress)
    assert result_of(tmp_path / "tracked") == result_of(plain)
    warnings = [line for line in progress.lines if line.startswith("WARNING")]
    assert len(warnings) == 2 and all(line.endswith("the run continues without it") for line in warnings)


def test_a_resumed_run_tells_its_trackers_where_it_continues(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[TrackedRun] = []

    def note(tracked: TrackedRun) -> Tracker:
        opened.append(tracked)
        raise ConnectionError

    monkeypatch.setattr("agent_r1.trackers.TRACKERS", {"wandb": note})
    monkeypatch.setattr(run, "require_trackers", lambda names: None)
    place = {"run": str(tmp_path / "run")}
    run.train(config_of(micro, tmp_path / "run", {**SHORT, "track": ("wandb",)}), micro, SilentProgress())
    run.resume(resolve_resume_config([Layer("test", {**place, "steps": 3})]), micro, SilentProgress())
    assert [tracked.step for tracked in opened] == [None, 2]
    assert opened[0].settings["algorithm.name"] == "grpo" and opened[0].name == "run"


def test_a_run_records_its_tools_its_validations_and_its_table(plain: Path) -> None:
    with closing(RunReader(plain)) as reader:
        assert [tool["function"]["name"] for tool in read_tools(reader)] == ["search"]
        validations = [(one["step"], one["split"], one["n"]) for one in read_results(reader, "validation")]
        assert validations == [(1, "validation", 1), (2, "validation", 1)]
        (table,) = read_results(reader, "table")
    assert {method: row["style-a"]["n"] for method, row in table["table"].items()} == {
        "base-tool-call": 1,
        "trained": 1,
    }
