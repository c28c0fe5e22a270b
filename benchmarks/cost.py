"""Measure what a part of the framework costs: equal training steps with and without it, in one run, in pairs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from rich.table import Table

from agent_r1.core.taskset import TaskSet
from agent_r1.store.ledger import Ledger
from agent_r1.trainer.updater import SelectedGroup
from agent_r1.training import loop, run
from agent_r1.training.config import TrainConfig
from agent_r1.training.monitor import HealthMonitor, MonitorState
from agent_r1.training.progress import Progress, SilentProgress, StepReport

T = TypeVar("T")


class NullMonitor:
    """A health monitor that checks nothing."""

    def __init__(self, *_: Any) -> None:
        self.state = MonitorState()

    def on_group(self, selected: SelectedGroup) -> None:
        return None

    def on_step(self, *_: Any) -> tuple[()]:
        return ()

    async def report(self, findings: tuple[()]) -> None:
        return None


class CpuTimes(SilentProgress):
    """Records the CPU time of the process, all threads, after each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.seconds.append(time.process_time())


def short_run(config: TrainConfig, taskset: TaskSet, steps: int, folder: Path, progress: Progress) -> None:
    """Run a few training steps with as little evaluation as possible."""
    changes = {"run": str(folder), "steps": steps, "evaluate_n": 1, "evaluate_every": 0, "pass_k": 0}
    run.train(config.model_copy(update=changes), taskset, progress)


@dataclass(frozen=True, slots=True)
class StepPair:
    """The CPU seconds of two equal training steps, one with and one without a part of the framework."""

    with_part: float
    without: float


def cpu_seconds(config: TrainConfig, taskset: TaskSet, steps: int) -> list[float]:
    """Return the CPU seconds of each step of a short run without the first, which is a warm-up."""
    times = CpuTimes()
    with tempfile.TemporaryDirectory() as folder:
        short_run(config, taskset, steps, Path(folder) / "bench", times)
    return [after - before for before, after in pairwise(times.seconds)]


def measure_pairs(
    config: TrainConfig, taskset: TaskSet, steps: int, repeat: int, removed: Callable[[], AbstractContextManager[Any]]
) -> list[StepPair]:
    """Return pairs of equal steps; ``removed()`` removes the part while a run trains.

    Runs with one seed take the same steps, so that steps form pairs. Other processes hardly change CPU seconds.
    """
    pairs: list[StepPair] = []
    for turn in range(repeat):
        seconds: dict[bool, list[float]] = {}
        for present in (True, False) if turn % 2 else (False, True):
            with nullcontext() if present else removed():
                seconds[present] = cpu_seconds(config, taskset, steps)
        pairs += map(StepPair, seconds[True], seconds[False])
    return pairs


def cost_table(name: str, pairs: Sequence[StepPair], own: float) -> Table:
    """Return the cost of a part of the framework, as the ratio of equal steps and by its ``own`` seconds a step."""
    ratios = sorted(pair.with_part / pair.without for pair in pairs)
    with_part = statistics.median(pair.with_part for pair in pairs)
    low, middle, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
    table = Table(name, "CPU seconds a step", "ratio", title=f"{len(pairs)} pairs of equal steps")
    table.add_row("without", f"{statistics.median(pair.without for pair in pairs):.4f}", "1.000")
    table.add_row("with", f"{with_part:.4f}", f"{middle:.3f} (half of the pairs: {low:.3f} to {high:.3f})")
    table.add_row("by itself", f"{own:.4f}", f"{own / with_part:.4f}")
    return table


def monitor_cost(config: TrainConfig, taskset: TaskSet, steps: int, repeat: int) -> Table:
    """Return the cost of the health monitor."""
    own: list[float] = []
    with (
        patch.object(HealthMonitor, "on_group", timed(own, HealthMonitor.on_group)),
        patch.object(HealthMonitor, "on_step", timed(own, HealthMonitor.on_step)),
        patch.object(HealthMonitor, "report", timed_async(own, HealthMonitor.report)),
    ):
        pairs = measure_pairs(config, taskset, steps, repeat, lambda: patch.object(loop, "HealthMonitor", NullMonitor))
    return cost_table("health monitor", pairs, sum(own) / (repeat * steps))


def seal_cost(config: TrainConfig, taskset: TaskSet, steps: int, repeat: int) -> Table:
    """Return the cost of sealing the rows of the ledger."""
    own: list[float] = []
    with patch.object(Ledger, "_seal", timed(own, Ledger._seal)):
        pairs = measure_pairs(config, taskset, steps, repeat, lambda: patch.object(Ledger, "_seal", number_rows))
    return cost_table("seals of the ledger", pairs, sum(own) / (repeat * steps))


def number_rows(ledger: Ledger, table: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return numbered rows without seals."""
    return [(row, b"", *values) for row, values in enumerate(rows, start=ledger.head.row + 1)]


def timed(seconds: list[float], work: Callable[..., T]) -> Callable[..., T]:
    """Return ``work`` that appends its CPU seconds: those of its thread, because the engine's thread runs meanwhile."""

    def measured(*arguments: Any) -> T:
        began = time.thread_time()
        result = work(*arguments)
        seconds.append(time.thread_time() - began)
        return result

    return measured


def timed_async(seconds: list[float], work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a coroutine function to record the CPU seconds of the process; nothing else runs meanwhile."""

    async def measured(*arguments: Any) -> Any:
        began = time.process_time()
        result = await work(*arguments)
        seconds.append(time.process_time() - began)
        return result

    return measured
