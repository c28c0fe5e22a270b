"""Trackers receive metrics, settings and attempts; one that raises or hangs changes nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from extras import requires

from agent_r1 import InvalidInput, Message, trackers as registry
from agent_r1.core.events import AttemptFinished, Event, StepMetrics, StepTimings
from agent_r1.core.redaction import flat_settings
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.trackers import AttemptSample, TensorBoardTracker, TrackedRun, TrackingRecorder, require_trackers

SECRET = "http://ann:pass-7@10.0.0.1:8800/search?token=tok-7"
METRICS = (StepMetrics(1, {"reward": 0.5, "reward/em": 0.25, "validation_em": 0.75}), StepTimings(1, {"seconds": 2.0}))


def attempt(index: int, text: str = "Who rules Alba?") -> AttemptFinished:
    name = AttemptId("demo", "task", 0, index)
    messages = (Message.user(text), Message.assistant(f"answer {index}"))
    return AttemptFinished(Trajectory(name, "task", (), Status.COMPLETED, rewards={"em": 1.0}, start=messages))


class Memory:
    """A recorder that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def record(self, *events: Event) -> None:
        self.events += events


class Notebook:
    """A tracker that keeps what it receives."""

    made: ClassVar[list[Notebook]] = []

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.metrics, self.attempts, self.end = run, {}, [], ""
        self.thread = threading.current_thread()
        self.made.append(self)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics[step] = dict(values)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        self.attempts += attempts

    def finish(self, end: str) -> None:
        self.end = end


class Raising(Notebook):
    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise SystemExit(f"no answer from {SECRET}\nat all")


class Unopened(Notebook):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("refused")


class Hanging(Notebook):
    released = threading.Event()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.released.wait()


@pytest.fixture(autouse=True)
def notebooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Notebook]]:
    monkeypatch.setattr(Notebook, "made", [])
    kinds = {"notebook": Notebook, "raising": Raising, "unopened": Unopened, "hanging": Hanging}
    monkeypatch.setattr("agent_r1.trackers.TRACKERS", {**registry.TRACKERS, **kinds})
    yield Notebook.made
    Hanging.released.set()
    Hanging.released = threading.Event()


def run_in(folder: Path, step: int | None = None) -> TrackedRun:
    return TrackedRun("demo", folder, flat_settings({"corpus": SECRET, "steps": 4}), step)


def record(
    folder: Path, names: Sequence[str], *batches: Sequence[Event], limit: float = 60.0
) -> tuple[list[str], list[Event]]:
    """Record batches with trackers. Return the warnings, and the events that were recorded."""
    warnings: list[str] = []
    memory = Memory()
    recorder = TrackingRecorder(memory, names, run_in(folder), warnings.append, limit)

    async def record_all() -> None:
        for batch in batches:
            await recorder.record(*batch)

    asyncio.run(record_all())
    recorder.close("completed")
    return warnings, memory.events


def test_metrics_are_grouped_by_readable_names(tmp_path: Path, notebooks: list[Notebook]) -> None:
    assert record(tmp_path, ["notebook"], METRICS) == ([], list(METRICS))
    assert notebooks[0].metrics == {
        1: {"reward/total": 0.5, "reward/em": 0.25, "validation/em": 0.75, "time/seconds": 2.0}
    }
    assert notebooks[0].end == "completed" and notebooks[0].thread is not threading.main_thread()


def test_the_first_attempts_are_shown_whatever_the_order_of_their_ends(
    tmp_path: Path, notebooks: list[Notebook]
) -> None:
    ended = [attempt(3), attempt(1, f"see {SECRET}"), attempt(0), attempt(2)]
    record(tmp_path, ["notebook"], ended, METRICS, [attempt(4)], [StepMetrics(2, {})], [StepMetrics(10, {})])
    assert [sample.name for sample in notebooks[0].attempts] == ["demo:0.0.0:task", "demo:0.1.0:task"]
    assert notebooks[0].attempts[0].text.splitlines()[1:] == [
        "completed, em 1.0",
        "[user] Who rules Alba?",
        "[assistant] answer 0",
    ]


def test_steps_that_are_repeated_after_a_restart_of_ranks_are_shown_once(
    tmp_path: Path, notebooks: list[Notebook]
) -> None:
    steps = [[StepMetrics(step, {"reward": float(place)})] for place, step in enumerate((1, 2, 3, 2, 3, 4))]
    steps[3] = [StepMetrics(2, {"reward": 3.0, "kl": 0.1})]
    record(tmp_path, ["notebook"], *steps, [StepMetrics(4, {"reward": 9.0, "validation_em": 0.5})])
    shown = {step: values["reward/total"] for step, values in notebooks[0].metrics.items() if step < 4}
    assert shown == {1: 0.0, 2: 1.0, 3: 2.0} and len(notebooks[0].metrics[2]) == 1
    assert notebooks[0].metrics[4] == {"validation/em": 0.5}  # the last call: a further value of the same step


def test_credentials_reach_no_tracker(tmp_path: Path, notebooks: list[Notebook]) -> None:
    record(tmp_path, ["notebook"], [attempt(0, f"see {SECRET}")], METRICS)
    assert notebooks[0].run.settings == {"steps": 4, "corpus": "http://***@10.0.0.1:8800/search?token=***"}
    assert "***@10.0.0.1" in notebooks[0].attempts[0].text and "-7" not in notebooks[0].attempts[0].text


@pytest.mark.parametrize(
    ("tracker", "limit", "warning"),
    [
        ("raising", 60.0, "SystemExit: no answer from http://***@10.0.0.1:8800/search?token=*** at all"),
        ("unopened", 60.0, "ConnectionError: refused"),
        ("hanging", 0.01, "0.01 s"),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(
    tmp_path: Path, notebooks: list[Notebook], tracker: str, limit: float, warning: str
) -> None:
    steps = [[StepMetrics(step, {"reward": 0.0})] for step in range(1, 6)]
    warnings, events = record(tmp_path, [tracker], *steps, limit=limit)
    assert len(warnings) == 1 and warning in warnings[0] and "\n" not in warnings[0]
    assert [event for event in events if isinstance(event, StepMetrics)] == [step for (step,) in steps]
    record(tmp_path, ["notebook", tracker], *steps, limit=max(limit, 0.5))
    assert [set(one.metrics) for one in notebooks if type(one) is Notebook] == [set(range(1, 6))]


def test_a_tracker_whose_package_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.core.errors.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"extra wandb: .* pip install 'agent-r1\[wandb\]'"):
        require_trackers(["wandb"])


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in read_events(folder).Scalars(name)}


@requires("tensorboard", "tensorboard")
def test_tensorboard_shows_metrics_settings_and_attempts(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\n# not a heading"
    assert record(tmp_path, ["tensorboard"], [attempt(0, hostile)], METRICS)[0] == []
    assert scalars(tmp_path, "reward/em") == {1: 0.25}
    texts = read_events(tmp_path).Tensors("attempts/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    [user] <script>alert(1)</script>\n    # not a heading\n" in texts
    settings = read_events(tmp_path).Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"corpus": "http://***@' in settings and "pass-7" not in settings


@requires("tensorboard", "tensorboard")
def test_tensorboard_hides_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    record(tmp_path, ["tensorboard"], *[[StepMetrics(step, {"reward": 0.0})] for step in range(1, 5)])
    resumed = TensorBoardTracker(run_in(tmp_path, step=2))
    resumed.log_metrics(3, {"reward/total": 1.0})
    resumed.finish("completed")
    assert scalars(tmp_path, "reward/total") == {1: 0.0, 2: 0.0, 3: 1.0}


HOSTILE_METRICS = [StepMetrics(1, {"reward": float("nan"), "reward/<b>&\n\u202e": 1.0, "kl": float("inf")})]


@requires("wandb", "wandb")
def test_wandb_continues_a_run_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["agent-r1", "train", "--corpus", SECRET])
    for _ in range(2):
        assert record(tmp_path, ["wandb"], [attempt(0)], METRICS, HOSTILE_METRICS)[0] == []
    written = list(tmp_path.rglob("*.wandb"))
    assert len({file.name for file in written}) == 1 and len(written) == 2
    assert not any(b"pass-7" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@requires("mlflow", "mlflow")
def test_mlflow_continues_a_run_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        assert record(tmp_path, ["mlflow"], [attempt(0)], METRICS, HOSTILE_METRICS)[0] == []
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = mlflow.search_runs(experiment_names=["agent-r1"], output_format="list")
    assert run.data.metrics["reward/em"] == 0.25 and run.data.params["steps"] == "4"
    assert run.info.status == "FINISHED"


@requires("trackio", "trackio")
def test_trackio_continues_a_run_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from trackio import sqlite_storage as storage

    for name in ("TRACKIO_DIR", "MEDIA_DIR"):
        monkeypatch.setattr(storage, name, tmp_path / name, raising=False)
    for _ in range(2):
        assert record(tmp_path, ["trackio"], [attempt(0)], METRICS, HOSTILE_METRICS)[0] == []
    logs = storage.SQLiteStorage.get_logs("agent-r1", "demo")
    assert [log["reward/em"] for log in logs if "reward/em" in log] == [0.25, 0.25]
    assert capfd.readouterr().out == ""
