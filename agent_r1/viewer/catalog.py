"""The runs that the viewer shows, and a summary of each run."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput
from agent_r1.store.folder import is_run
from agent_r1.store.reader import RunReader
from agent_r1.store.writer import writing_process
from agent_r1.viewer.charts import BEST_BY, Curves, best_step, sparkline

RunState = Literal["complete", "training", "stopped", "failed"]
"""The state of a run.

- stopped: a signal or a kill ended the run before its last step.
- failed: an error or a health check ended the run.
"""

_SIGNALS = ("SIGINT", "SIGTERM")
"""Names of signals. If the recorded reason of a run's end is one of these names, the run has the state "stopped".

If another reason is recorded, the run has the state "failed".
"""


class Catalog:
    """The runs that the viewer shows. Each of the ``folders`` is a run, or contains folders of runs."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(map(str, self._folders))

    def runs(self) -> Mapping[str, Path]:
        """Return the folder of each run, by the name of the run. New runs appear at the next call.

        The name of a run is the name of its folder. If several folders have the name ``demo``, the second run is
        ``demo-2``.
        """
        runs: dict[str, Path] = {}
        for folder in self._all():
            name, count = folder.resolve().name.encode("utf-8", "backslashreplace").decode(), 1
            while (unique := name if count == 1 else f"{name}-{count}") in runs:
                count += 1
            runs[unique] = folder
        return runs

    def _all(self) -> Iterator[Path]:
        seen = set()
        for folder in self._folders:
            for run in [folder] if is_run(folder) else _inside(folder):
                if run.resolve() not in seen:
                    seen.add(run.resolve())
                    yield run


def _inside(folder: Path) -> list[Path]:
    try:
        found = [Path(entry) for entry in os.scandir(folder) if is_run(Path(entry))]
    except (OSError, ValueError):  # ValueError: the text cannot be a path
        return []
    return sorted(found, key=lambda run: run.joinpath("config.json").stat().st_mtime, reverse=True)


@contextmanager
def opened(folder: Path) -> Iterator[RunReader]:
    with closing(RunReader(folder)) as reader:
        yield reader


@dataclass(frozen=True, slots=True)
class Validation:
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A row in the list of runs.

    Attributes:
        detail: why the run stopped, or "".
        step, steps: how many steps were taken, and how many the run should take.
        reward: the mean reward of the last step, or None.
        seconds: the time from the start of the run to its last event.
        updated: the time of the last change, in seconds since 1970.
        spark: the curve of the mean reward, as an SVG path.
        error: why the run cannot be read, or "". With an error, only ``name`` and ``folder`` are known.
    """

    name: str
    folder: Path
    state: RunState = "stopped"
    detail: str = ""
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
        with opened(folder) as reader:
            return summarize_reader(name, folder, reader)
    except (InvalidInput, sqlite3.Error, OSError) as error:
        return RunSummary(name, folder, error=str(error))


def summarize_reader(name: str, folder: Path, reader: RunReader) -> RunSummary:
    config = reader.config()
    curves = {metric: reader.curve(metric) for metric in ("reward", BEST_BY, "tokens_per_second")}
    best, reward = best_step(curves), curves["reward"]
    events, segments = reader.recent_events(50), reader.segments()
    training = writing_process(folder) is not None
    last = events[-1] if events else None
    updated = max([event.time for event in events] + [segment.time for segment in segments], default=0.0)
    stopped = last.event.detail if last is not None and last.event.kind == "stopped" else ""
    ended: RunState = "failed" if stopped and stopped not in _SIGNALS else "stopped"
    state: RunState = "complete" if reader.is_complete() else "training" if training else ended
    return RunSummary(
        name=name,
        folder=folder,
        state=state,
        detail=stopped if state in ("stopped", "failed") else "",
        step=reader.last_step(),
        steps=_integer(config.get("steps")),
        taskset=str(config.get("taskset") or ""),
        model=str(config.get("model") or ""),
        algorithm=algorithm_name(config),
        attempts=sum(reader.count_fates().values()),
        reward=_last(reward),
        best=None if best is None else Validation(curves[BEST_BY][best], best),
        tokens_per_second=_last(curves["tokens_per_second"]),
        seconds=updated - segments[0].time if segments else 0.0,
        updated=max(updated, _modified(folder)),
        spark=sparkline(reward),
    )


def read_curves(reader: RunReader) -> Curves:
    """Return the curve of each metric of a run, by the name of the metric."""
    curves: dict[str, dict[int, float]] = {}
    for metrics in reader.metrics():
        for name, value in metrics.values.items():
            curves.setdefault(name, {})[metrics.step] = value
    return curves


def algorithm_name(config: Mapping[str, Any]) -> str:
    algorithm = config.get("algorithm")
    return str(algorithm.get("name", "")) if isinstance(algorithm, Mapping) else str(algorithm or "")


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _last(curve: Mapping[int, float]) -> float | None:
    return curve[max(curve)] if curve else None


def _modified(folder: Path) -> float:
    # Return the time at which the database was last written, in seconds since 1970; 0.0 if there is no database.
    times = [0.0]
    for name in ("run.db", "run.db-wal"):
        try:
            times.append(folder.joinpath(name).stat().st_mtime)
        except OSError:
            continue
    return max(times)
