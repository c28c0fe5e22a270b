"""Progress of a run, as it is shown on a terminal or in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of one optimizer step.

    ``em`` is None if there is no exact match. ``metrics`` are all metrics of the step by name.
    """

    step: int
    reward: float
    em: float | None
    tokens_per_second: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Progress(Protocol):
    """Shows the progress of a run."""

    def print_line(self, text: str) -> None:
        """Print a line: a phase that begins, or a warning."""
        ...

    def start(self, steps: int, taken: int = 0) -> None:
        """Training starts: ``steps`` in all, of which ``taken`` are done."""
        ...

    def on_step(self, report: StepReport) -> None: ...

    def finish(self) -> None:
        """Training is over or was interrupted. May be called again."""
        ...


class SilentProgress:
    """Shows nothing."""

    def print_line(self, text: str) -> None:
        return None

    def start(self, steps: int, taken: int = 0) -> None:
        return None

    def on_step(self, report: StepReport) -> None:
        return None

    def finish(self) -> None:
        return None


class LineProgress:
    """Prints one line per step: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps, self._taken, self._began = 0, 0, 0.0

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()

    def on_step(self, report: StepReport) -> None:
        self.print_line(format_step(report, self._steps, time.monotonic() - self._began, self._taken))

    def finish(self) -> None:
        return None


class ProgressBar:
    """A progress bar for terminals."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(BarColumn(), TextColumn("{task.description}", markup=False), console=console)
        self._console = console
        self._task: TaskID | None = None
        self._steps, self._taken, self._began = 0, 0, 0.0

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def start(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()
        self._task = self._bar.add_task(f"step {taken}/{steps}", total=steps, completed=taken)
        self._bar.start()

    def on_step(self, report: StepReport) -> None:
        assert self._task is not None, "on_step was called before start"
        line = format_step(report, self._steps, time.monotonic() - self._began, self._taken)
        self._bar.update(self._task, completed=report.step, description=line)

    def finish(self) -> None:
        self._bar.stop()


def format_step(report: StepReport, steps: int, elapsed: float, taken: int = 0) -> str:
    """Return a step as one line. ``elapsed`` seconds have passed since ``taken`` steps were done.

    Example:
        >>> format_step(StepReport(3, 0.5, 0.25, 1234.5), steps=12, elapsed=6.0)
        'step 3/12  reward 0.500  EM 0.250  1234 tokens/s  0:18 left'
    """
    left = round(elapsed / (report.step - taken) * (steps - report.step))
    em = "" if report.em is None else f"  EM {report.em:.3f}"
    gap = report.metrics.get("logprob_gap", 0.0)  # in float32 it is about 1e-6
    shown_gap = f"  log-prob gap {gap:.3f}" if gap >= 1e-3 else ""
    speed = f"{report.tokens_per_second:.0f} tokens/s"
    time_left = f"{left // 60}:{left % 60:02d} left"
    return f"step {report.step}/{steps}  reward {report.reward:.3f}{em}{shown_gap}  {speed}  {time_left}"


def make_progress(console: Console) -> Progress:
    """Return the progress for a console: a bar on a terminal, lines elsewhere."""
    return ProgressBar(console) if console.is_terminal else LineProgress(console)
