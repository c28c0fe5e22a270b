"""What a run is: its state and settings, attempts, curves, results, critic and events, for pages and the terminal."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.profile import CPU_SECONDS, PARTS, SECONDS, mean_profile
from agent_r1.core.trajectory import Status, Trajectory, can_be_summed, weighted_rewards
from agent_r1.store.reader import (
    AttemptFateName,
    AttemptFilter,
    RecordedEvent,
    ResultKind,
    RunReader,
    read_file,
    read_hardware,
    read_results,
)
from agent_r1.store.writer import writing_process
from agent_r1.viewer.charts import BEST_BY, Curve, Curves, best_step, sparkline
from agent_r1.viewer.text import flatten, number

RunState = Literal["complete", "training", "stopped", "failed"]
"""The state of a run.

- stopped: a signal or a kill ended the run before its last step.
- failed: an error or a health check ended the run.
"""

_SIGNALS = ("SIGINT", "SIGTERM")
"""If the recorded reason of a run's end is one of these names, the run has the state "stopped". Else it has failed."""


@dataclass(frozen=True, slots=True)
class Validation:
    """The share of right answers of a validation, and its 95 % interval from ``low`` to ``high`` if it was recorded."""

    step: int
    em: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A row in the list of runs.

    Attributes:
        detail: why the run stopped, or "".
        process: the id of the process that writes the run, if known.
        step, steps: how many steps were taken, and how many the run should take.
        reward: the mean reward of the last step, or None.
        seconds: the time in which the run was trained, without the time between a stop and its resume.
        updated: the time of the last change, in seconds since 1970.
        spark: the curve of the mean reward, as an SVG path.
        error: why the run cannot be read, or "". With an error, only ``name`` and ``folder`` are known.
    """

    name: str
    folder: Path
    state: RunState = "stopped"
    detail: str = ""
    process: int | None = None
    step: int = 0
    steps: int = 0
    taskset: str = ""
    model: str = ""
    algorithm: str = ""
    attempts: int = 0
    reward: float | None = None
    best: Validation | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    updated: float = 0.0
    spark: str = ""
    error: str = ""


def summarize(name: str, folder: Path) -> RunSummary:
    """Return the summary of the run in ``folder``. The summary has an ``error`` if the run cannot be read."""
    try:
        with closing(RunReader(folder)) as reader:
            return summarize_reader(name, folder, reader)
    except (InvalidInput, sqlite3.Error, OSError) as error:
        return RunSummary(name, folder, error=str(error))


def summarize_reader(name: str, folder: Path, reader: RunReader) -> RunSummary:
    config = reader.config()
    curves = {metric: reader.curve(metric) for metric in ("reward", BEST_BY, "tokens_per_second")}
    best, reward = best_step(curves), curves["reward"]
    events, segments = reader.recent_events(50), reader.segments()
    process, last = writing_process(folder), events[-1] if events else None
    updated = max([event.time for event in events] + [segment.time for segment in segments], default=0.0)
    stopped = last.event.detail if last is not None and last.event.kind == "stopped" else ""
    ended: RunState = "failed" if stopped and stopped not in _SIGNALS else "stopped"
    state: RunState = "complete" if reader.is_complete() else ended if process is None else "training"
    algorithm, steps = config.get("algorithm"), config.get("steps")
    files = (folder / name for name in ("run.db", "run.db-wal"))
    return RunSummary(
        name=name,
        folder=folder,
        state=state,
        detail=stopped if state in ("stopped", "failed") else "",
        process=process,
        step=reader.last_step(),
        steps=steps if isinstance(steps, int) else 0,
        taskset=str(config.get("taskset") or ""),
        model=str(config.get("model") or ""),
        algorithm=str((algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm) or ""),
        attempts=sum(reader.count_fates().values()),
        reward=_last(reward),
        best=None if best is None else Validation(best, curves[BEST_BY][best]),
        tokens_per_second=_last(curves["tokens_per_second"]),
        seconds=reader.active_seconds(time.time() if state == "training" else None),
        updated=max([updated, *(file.stat().st_mtime for file in files if file.exists())]),
        spark=sparkline(reward),
    )


def _last(curve: Curve) -> float | None:
    return curve[max(curve)] if curve else None


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    default: Any = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that the page of a run, and ``agent-r1 show RUN``, say about it."""

    summary: RunSummary
    config: Mapping[str, Any]  # the settings by dotted key
    settings: tuple[Setting, ...]  # the settings that differ from their defaults, except those of the algorithm
    algorithm: tuple[Setting, ...]  # the settings of the algorithm that are not empty
    fates: Mapping[AttemptFateName, int]
    statuses: Mapping[Status, int]
    validations: tuple[Validation, ...]  # in the order of steps
    # the cells of the result table at the end of the run: ``table[method][split]``. {} if there is none
    table: Mapping[str, Mapping[str, Mapping[str, float]]]
    measure: str  # what the numbers of the table measure: "exact match", or a reward
    curves: Curves  # the values by step of each metric and timing
    file: Path | None  # the Python file that defines the task set, if any
    # the run, step and checksum of the weights with which the run began; {} if no other run made them
    parent: Mapping[str, Any]
    hardware: Mapping[str, Any]  # of the last start or resumption; {} if not recorded
    # the seconds of each part of an average step by metric name, empty if the run was not profiled
    profile: Mapping[str, float]
    critic: CriticCalibration | None  # None without a critic whose values were recorded
    events: Sequence[RecordedEvent]  # oldest first, with their details as text for people

    @property
    def warnings(self) -> int:
        return sum(event.event.kind == "warning" for event in self.events)

    @property
    def last(self) -> Validation | None:
        return self.validations[-1] if self.validations else None

    @property
    def best(self) -> Validation | None:
        """The best validation, the last of them if several are equal."""
        return max(self.validations, key=lambda one: (one.em, one.step), default=None)

    @property
    def best_checkpoint(self) -> Path | None:
        """The folder with the weights of the best validation, if it exists."""
        folder = self.summary.folder / "checkpoints" / f"step-{self.best.step if self.best else 0}"
        return folder if folder.is_dir() else None

    @property
    def splits(self) -> tuple[str, ...]:
        """The columns of the result table."""
        return tuple(dict.fromkeys(split for cells in self.table.values() for split in cells))

    def to_json(self) -> dict[str, Any]:
        summary, best = self.summary, self.best_checkpoint
        return {
            "run": str(summary.folder),
            "state": summary.state,
            "detail": summary.detail,
            "seconds": summary.seconds,
            "step": summary.step,
            "steps": summary.steps,
            "taskset": summary.taskset,
            "file": None if self.file is None else str(self.file),
            "model": summary.model,
            "parent": self.parent or None,
            "algorithm": summary.algorithm,
            "settings": {setting.key: setting.value for setting in self.settings},
            "attempts": summary.attempts,
            "fates": dict(self.fates),
            "statuses": {status.value: count for status, count in self.statuses.items()},
            "validation": {"last": self.last and asdict(self.last), "best": self.best and asdict(self.best)},
            "best_checkpoint": None if best is None else str(best),
            "table": self.table,
            "curves": self.curves,
            "hardware": self.hardware,
            "profile": {
                part: {
                    "seconds": self.profile[SECONDS + part],
                    "cpu_seconds": self.profile.get(CPU_SECONDS + part, 0.0),
                }
                for part in PARTS
                if SECONDS + part in self.profile
            },
            "critic": self.critic and asdict(self.critic),
            "warnings": self.warnings,
            "events": [{"time": one.time, "segment": one.segment, **asdict(one.event)} for one in self.events],
        }


def read_report(name: str, folder: Path, reader: RunReader, defaults: Mapping[str, Any]) -> RunReport:
    """Return the report of the run in ``folder``. ``defaults`` holds the default of each setting by dotted key."""
    curves = read_curves(reader)
    config, (measure, table) = flatten(reader.config()), _read_table(reader)
    return RunReport(
        summary=summarize_reader(name, folder, reader),
        config=config,
        settings=tuple(_own_settings(config, defaults)),
        # Default values are included, because they depend on the algorithm.
        algorithm=tuple(
            Setting(key.removeprefix(ALGORITHM), value)
            for key, value in config.items()
            if key.startswith(ALGORITHM) and key not in {*DESCRIPTIVE, f"{ALGORITHM}name"} and value
        ),
        fates=reader.count_fates(),
        statuses=reader.count_statuses(),
        validations=tuple(_validations(reader, curves)),
        table=table,
        measure=measure,
        curves=curves,
        file=read_file(reader),
        parent=next(read_results(reader, "parent"), {}),
        hardware=read_hardware(reader),
        profile=mean_profile(curves),
        critic=read_critic(reader),
        events=tuple(
            RecordedEvent(one.segment, one.time, _readable(one.event))
            for one in reader.recent_events(-1)
            if one.event.kind not in SHOWN_ELSEWHERE
        ),
    )


def read_curves(reader: RunReader) -> Curves:
    """Return the curve of each metric of a run, by the name of the metric."""
    curves: dict[str, dict[int, float]] = {}
    for metrics in reader.metrics():
        for name, value in metrics.values.items():
            curves.setdefault(name, {})[metrics.step] = value
    return curves


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""The errors of reading a result that is damaged. The rest of a run is shown."""


def _validations(reader: RunReader, curves: Curves) -> Iterator[Validation]:
    try:
        cells = {int(cell["step"]): cell for cell in read_results(reader, "validation")}
        bounds = {step: (float(cell["low"]), float(cell["high"])) for step, cell in cells.items()}
    except _DAMAGE:
        bounds = {}
    for step, em in sorted(curves.get(BEST_BY, {}).items()):
        yield Validation(step, em, *bounds.get(step, (None, None)))


def _read_table(reader: RunReader) -> tuple[str, Mapping[str, Mapping[str, Mapping[str, float]]]]:
    # What the numbers measure, and table[method][split], without the splits in which every attempt failed.
    try:
        result = ({"measure": "", "table": {}}, *read_results(reader, "table"))[-1]
        return str(result["measure"]), {
            method: {split: {key: float(cell[key]) for key in ("em", "low", "high")} for split, cell in cells if cell}
            for method, cells in ((method, row.items()) for method, row in result["table"].items())
        }
    except _DAMAGE:
        return "", {}


SHOWN_ELSEWHERE: frozenset[ResultKind] = frozenset({"table", "tools", "file", "hardware", "parent"})
"""The kinds of events that the list of events leaves out."""


def _readable(event: LogEvent) -> LogEvent:
    if event.kind == "checkpoint_saved":
        return LogEvent(event.kind, f"step {event.detail}")
    if event.kind != "validation":
        return event
    try:
        data = json.loads(event.detail)
        text = f"step {data['step']}, {data['split']}: {data['measure']} {interval(data)}, {data['n']} questions"
        return LogEvent(event.kind, text)
    except _DAMAGE:
        return event


def interval(cell: Mapping[str, float]) -> str:
    """Return the exact match of a cell with its 95 % interval, such as "0.95 (0.92 to 0.98)"."""
    return f"{number(cell['em'], 3)} ({cell['low']:z.2f} to {cell['high']:z.2f})"


ALGORITHM = "algorithm."
DESCRIPTIVE = frozenset({"algorithm.paper", "algorithm.deviations", "run"})
"""Settings that only describe a run."""


def _own_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Setting]:
    for key, value in config.items():
        default = defaults.get(key)  # None for an entry of a table, such as reward_weights.f1
        if not (key.startswith(ALGORITHM) or key in DESCRIPTIVE or _equal(value, default) or value == {}):
            yield Setting(key, value, default)


def differing_settings(reports: Sequence[RunReport]) -> Mapping[str, tuple[Any, ...]]:
    """Return the settings that differ between runs: one value per run, None for a run without the setting."""
    keys = dict.fromkeys(key for report in reports for key in report.config if key not in DESCRIPTIVE)
    rows = {key: tuple(report.config.get(key) for report in reports) for key in keys}
    return {key: values for key, values in rows.items() if any(not _equal(one, values[0]) for one in values)}


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


MAX_CRITIC_ATTEMPTS = 200
"""The critic is judged by the newest attempts with recorded values: it changes, and reading all would take long."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of the critic at one turn: ``value``, and what it predicts, ``reward``.

    ``reward`` is the sum of the weighted rewards of the turn, of all later turns, and of the trajectory as a whole.
    """

    turn: int
    value: float
    reward: float


@dataclass(frozen=True, slots=True)
class CriticRow:
    """The predictions of all turns, or of one turn: their number, mean V, mean G, and 1 - Var(G - V) / Var(G).

    V is the predicted and G the actual sum of rewards. ``explained`` is NaN if all G are equal.
    """

    name: str
    count: int
    value: float
    reward: float
    explained: float


@dataclass(frozen=True, slots=True)
class CriticCalibration:
    """How well the critic predicts.

    ``calibration_error`` is the mean of |mean V - mean G| over ``BINS`` ranges of V, weighted by their predictions.
    """

    rows: tuple[CriticRow, ...]
    calibration_error: float


BINS = 5


def read_critic(reader: RunReader) -> CriticCalibration | None:
    """Return the report on the critic of a run; None if no values were recorded."""
    weights = reader.config().get("reward_weights", {})
    recorded = AttemptFilter(recorded=True)
    predictions: list[Prediction] = []
    for summary in reader.list_attempts(recorded, descending=True, limit=MAX_CRITIC_ATTEMPTS):
        first = {one.turn: one.values[0] for one in reader.token_records(summary.attempt) if one.values}
        if not first:  # an algorithm without a critic
            break
        trajectory = reader.trajectory(summary.attempt)
        predictions += [] if trajectory is None else _predictions(trajectory, first, weights)
    return make_critic_report(predictions) if predictions else None


def _predictions(
    trajectory: Trajectory, values: Mapping[int, float], weights: Mapping[str, float]
) -> Iterator[Prediction]:
    rewards = list(weighted_rewards(trajectory, weights))
    for turn, value in values.items():
        following = [one.value for one in rewards if one.turn is None or one.turn >= turn]
        if math.isfinite(value) and all(map(can_be_summed, following)):
            yield Prediction(turn, value, math.fsum(following))


def make_critic_report(predictions: Sequence[Prediction]) -> CriticCalibration:
    turns = sorted({one.turn for one in predictions})
    rows = [_critic_row("all turns", predictions)]
    rows += [_critic_row(f"turn {turn}", [one for one in predictions if one.turn == turn]) for turn in turns]
    ranked = sorted(predictions, key=lambda one: one.value)
    edges = [index * len(ranked) // BINS for index in range(BINS + 1)]
    bins = [ranked[start:end] for start, end in pairwise(edges) if end > start]
    error = math.fsum(abs(math.fsum(one.value - one.reward for one in part)) for part in bins) / len(ranked)
    return CriticCalibration(tuple(rows), error)


def _critic_row(name: str, predictions: Sequence[Prediction]) -> CriticRow:
    values, rewards = [one.value for one in predictions], [one.reward for one in predictions]
    total, left = pvariance(rewards), pvariance([one.reward - one.value for one in predictions])
    return CriticRow(name, len(predictions), fmean(values), fmean(rewards), 1 - left / total if total else math.nan)
