"""Trackers: send the metrics of a run to TensorBoard, Weights & Biases, Trackio or MLflow during training."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from agent_r1.core.errors import import_extra, require_extra, shorten
from agent_r1.core.events import AttemptFinished, Event, LogEvent, Recorder, StepMetrics, StepTimings
from agent_r1.core.messages import to_openai
from agent_r1.core.redaction import redact, redact_values
from agent_r1.core.trajectory import RewardValue, Status, Trajectory

RunEnd = Literal["completed", "stopped", "failed"]
"""How a run ended. ``completed``: all steps are done. ``stopped``: a signal stopped the run. ``failed``: an error ended
the run."""

PROJECT = "agent-r1"
"""The default name of the project (in MLflow: experiment) to which a tracker adds a run."""

TRACKERS_FOLDER = "trackers"
"""The subfolder of a run's folder that has a file for each tracker, with the id that the tracker gave to the run."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows.

    ``settings`` has dotted keys and no credentials. ``step`` is the step from which the run was resumed, or None.
    """

    name: str
    folder: Path
    settings: Mapping[str, str | int | float | bool | None]
    step: int | None = None

    def saved_id(self, tracker: str) -> str | None:
        path = self.folder / TRACKERS_FOLDER / tracker
        return path.read_text("utf-8").strip() if path.is_file() else None

    def save_id(self, tracker: str, value: str) -> None:
        """Save the id that the run has in ``tracker``. A resumed run keeps this id."""
        path = self.folder / TRACKERS_FOLDER / tracker
        path.parent.mkdir(exist_ok=True)
        path.write_text(value + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class AttemptSample:
    """An attempt that trackers show as text, with its messages in the OpenAI format. Credentials are hidden."""

    name: str
    status: str
    rewards: Mapping[str, RewardValue]
    messages: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> AttemptSample:
        shown = (message.with_images_as_text() for message in trajectory.messages)
        messages = tuple(redact_values(to_openai(message)) for message in shown)
        return cls(str(trajectory.attempt), trajectory.status.value, trajectory.rewards, messages)

    @property
    def summary(self) -> str:
        return ", ".join([self.status, *(f"{name} {value}" for name, value in self.rewards.items())])

    @property
    def text(self) -> str:
        lines = [self.name, self.summary]
        for message in self.messages:
            lines.append(f"[{message['role']}] {message['content']}".rstrip())
            for call in (call["function"] for call in message.get("tool_calls", ())):
                lines.append(f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})")
        return "\n".join(lines)


class Tracker(Protocol):
    """A client that shows the metrics of one run, such as {"reward/em": 0.5}, and a few attempts of some steps.

    One thread makes the tracker and calls its methods, ``finish`` last. A method may block, and may raise anything:
    the run then continues without the tracker. Metrics can be NaN or infinite.
    """

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None: ...

    def finish(self, end: RunEnd) -> None: ...


ROLLOUT = {
    *(status.value for status in Status),
    *("unscored", "retried", "calls", "invalid_calls", "failed_calls", "groups", "refilled_groups", "failed"),
    *("filtered", "staleness", "tokens", "em"),
}
"""Names of metrics about attempts, without the names of rewards."""


def metric_name(name: str, is_timing: bool = False) -> str:
    """Return the name of a metric in a tracker: ``GROUP/NAME``.

    Example:
        >>> [metric_name(name) for name in ("reward", "reward/em", "validation_em", "calls", "entropy")]
        ['reward/total', 'reward/em', 'validation/em', 'rollout/calls', 'train/entropy']
        >>> metric_name("update_seconds", is_timing=True)
        'time/update_seconds'
    """
    if "/" in name:
        return name
    if is_timing:
        return f"time/{name}"
    if name == "reward":
        return "reward/total"
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"rollout/{name}" if name in ROLLOUT else f"train/{name}"


MAX_PARAMS = 100  # the limit of one MLflow request

STATUS: Mapping[RunEnd, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """MLflow. MLFLOW_TRACKING_URI selects a server, MLFLOW_EXPERIMENT_NAME an experiment (default: ``agent-r1``)."""

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_extra("mlflow", "mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        saved = run.saved_id("mlflow")
        if saved is not None:
            self._id = saved
            self._client.update_run(saved, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        run.save_id("mlflow", self._id)
        params = [self._entities.Param(_valid_name(name), str(value)) for name, value in run.settings.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_valid_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        text = "\n\n".join(attempt.text for attempt in attempts)
        self._client.log_text(self._id, text, f"attempts/step-{step:06}.txt")

    def finish(self, end: RunEnd) -> None:
        self._client.set_terminated(self._id, status=STATUS[end])


def _valid_name(name: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", name)[:250]


class TensorBoardTracker:
    """Event files in ``RUN/tensorboard``. After a resume, TensorBoard hides the earlier values of repeated steps."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports the package tensorboard

        first = None if run.step is None else run.step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first, flush_secs=10)
        self._writer.add_text("settings", _as_code(json.dumps(run.settings, indent=2)), run.step or 0)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        for number, attempt in enumerate(attempts):
            self._writer.add_text(f"attempts/{number}", _as_code(attempt.text), step)

    def finish(self, end: RunEnd) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


class TrackioTracker:
    """Trackio, with its usual environment variables, such as TRACKIO_PROJECT (default: ``agent-r1``)."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_extra("trackio", "trackio")
        for name in ("trackio", "trackio.utils", "trackio.run"):
            # trackio prints its messages on stdout, which belongs to the result of the command.
            vars(sys.modules[name])["print"] = partial(print, file=sys.stderr)
        known = run.saved_id("trackio") is not None
        run.save_id("trackio", run.name)
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run.name,
            config=dict(run.settings),
            resume="allow" if known else "never",
            embed=False,
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        # trackio stores JSON, which has no NaN
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        traces = {
            f"attempts/{number}": self._trackio.Trace(
                [dict(message) for message in attempt.messages],
                metadata={"attempt": attempt.name, "result": attempt.summary},
            )
            for number, attempt in enumerate(attempts)
        }
        self._run.log(traces, step=step)

    def finish(self, end: RunEnd) -> None:
        self._run.finish()


STEP = "step"
"""The metric on the horizontal axis of the charts. wandb's own step counter cannot go back after a resume."""


class WandbTracker:
    """Weights & Biases, with its usual environment variables, such as WANDB_PROJECT (default: ``agent-r1``)."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = import_extra("wandb", "wandb")
        name = run.saved_id("wandb") or uuid.uuid4().hex[:12]
        run.save_id("wandb", name)
        # Without the metadata that wandb collects: it contains the command line, which can contain credentials.
        # Without the capture of the console, which replaces sys.stdout.
        settings = self._wandb.Settings(console="off", x_disable_meta=True, x_save_requirements=False)
        self._run = self._wandb.init(
            id=name,
            name=run.name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=str(run.folder),
            config=dict(run.settings),
            allow_val_change=True,
            resume="allow",
            reinit="create_new",
            save_code=False,
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        rows = [[step, attempt.name, attempt.summary, attempt.text] for attempt in attempts]
        table = self._wandb.Table(columns=["step", "attempt", "result", "conversation"], data=rows)
        self._run.log({STEP: step, "attempts": table})

    def finish(self, end: RunEnd) -> None:
        self._run.finish(exit_code=0 if end == "completed" else 1)


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""The name of a tracker, of its package, and of the extra that installs the package."""

TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


def require_trackers(names: Iterable[TrackerName]) -> None:
    """Raise InvalidInput if the package of a tracker is not installed. The packages are not imported."""
    for name in names:
        require_extra(name, name)


HANG_SECONDS = 120.0
"""The time limit of each call of a tracker, and of the end of all trackers."""

SAMPLES, SAMPLE_EVERY = 2, 10
"""Trackers show at most SAMPLES attempts as text, of step 1 and of each SAMPLE_EVERYth step."""

Job = Callable[[Tracker], object]


class TrackingRecorder:
    """A recorder that passes all events on to ``recorder`` and sends their metrics to trackers.

    Each tracker runs in its own daemon thread, and ``record`` never waits for a tracker. If a call of a tracker raises
    or takes more than ``limit`` seconds, one warning is printed and the tracker gets no more calls.

    A restart of the trainer's ranks can repeat steps. A tracker does not get the values of a repeated step again,
    because most services cannot replace a value.

    ``recorder`` writes the events to the disk, and ``warn`` prints a warning. The default ``limit`` is HANG_SECONDS.
    """

    def __init__(
        self,
        recorder: Recorder,
        names: Sequence[str],
        run: TrackedRun,
        warn: Callable[[str], object],
        limit: float | None = None,
    ) -> None:
        self._recorder, self._warn = recorder, warn
        self._limit = HANG_SECONDS if limit is None else limit
        self._threads = [_TrackerThread(name, run) for name in names]
        self._attempts: list[Trajectory] = []
        self._newest_step, self._names_of_newest = 0, set[str]()  # which values the trackers have

    async def record(self, *events: Event) -> None:
        """Record the events on the disk, then send them to the trackers. Only errors of the disk are raised."""
        await self._recorder.record(*events)
        if self._threads:
            self._track(events)
            for failure in self._drop_failed():
                await self._recorder.record(LogEvent("warning", failure))

    def close(self, end: RunEnd) -> None:
        """Finish all trackers, within ``limit`` seconds in all."""
        for thread in self._threads:
            thread.submit(methodcaller("finish", end))
            thread.submit(None)
        deadline = time.monotonic() + self._limit
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            if thread.failure is None and thread.is_alive():
                thread.failure = f"it did not end within {self._limit:g} s"
        self._drop_failed()

    def _track(self, events: Sequence[Event]) -> None:
        values: dict[int, dict[str, float]] = {}
        for event in events:
            match event:
                case StepMetrics(step, metrics):
                    values.setdefault(step, {}).update({metric_name(name): one for name, one in metrics.items()})
                case StepTimings(step, metrics):
                    values.setdefault(step, {}).update({metric_name(name, True): one for name, one in metrics.items()})
                case AttemptFinished(trajectory):
                    # The first attempts of the first groups, in whatever order the attempts end.
                    self._attempts.append(trajectory)
                    self._attempts = sorted(self._attempts, key=lambda one: one.attempt.sort_key)[:SAMPLES]
        for step, metrics in values.items():
            if new := self._without_repeated(step, metrics):
                self._submit(methodcaller("log_metrics", step, new))
                if self._attempts and (step == 1 or step % SAMPLE_EVERY == 0):
                    samples = tuple(map(AttemptSample.of, self._attempts))
                    self._submit(methodcaller("log_attempts", step, samples))
            self._attempts = []

    def _without_repeated(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if step > self._newest_step:
            self._newest_step, self._names_of_newest = step, set()
        if step < self._newest_step:
            return {}
        new = {name: value for name, value in metrics.items() if name not in self._names_of_newest}
        self._names_of_newest |= new.keys()
        return new

    def _submit(self, job: Job) -> None:
        for thread in self._threads:
            thread.submit(job)

    def _drop_failed(self) -> list[str]:
        failures = []
        for thread in list(self._threads):
            thread.failure = thread.failure or thread.hangs(self._limit)
            if thread.failure is not None:
                self._threads.remove(thread)
                failures.append(f"tracker {thread.tracker}: {thread.failure}; the run continues without it")
                self._warn(f"WARNING: {failures[-1]}")
        return failures


class _TrackerThread(threading.Thread):
    def __init__(self, tracker: str, run: TrackedRun) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker = tracker
        self.failure: str | None = None
        self._tracked_run = run
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._called: float | None = time.monotonic()  # when the call in progress began; None between calls
        self.start()

    def submit(self, job: Job | None) -> None:
        self._jobs.put(job)

    def hangs(self, limit: float) -> str | None:
        called = self._called
        if called is None or time.monotonic() - called <= limit:
            return None
        return f"a call did not return within {limit:g} s"

    def run(self) -> None:
        try:
            tracker = TRACKERS[self.tracker](self._tracked_run)
            self._called = None
            while self.failure is None and (job := self._jobs.get()) is not None:
                self._called = time.monotonic()
                job(tracker)
                self._called = None
        except BaseException as error:  # SystemExit too, which packages raise in order to end the process
            self._called = None
            self.failure = redact(" ".join(shorten(f"{type(error).__name__}: {error}").split()))
