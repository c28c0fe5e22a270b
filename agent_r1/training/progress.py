"""Displays of the progress of a run or an evaluation, on a terminal or in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agent_r1.training.metrics import EXACT_MATCH_NAMES, REWARD_MEAN, VALIDATION_SUBSET


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one optimizer step."""

    step: int
    reward: float  # the mean reward
    em: float | None  # the mean exact match; None if the task set reports no exact match
    tokens_per_second: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # all metrics of the step, by name


class Progress(Protocol):
    """A display of the progress of a run or an evaluation."""

    def print_line(self, text: str) -> None:
        """Print a line, such as the next phase or a warning."""
        ...

    def start(self, steps: int, taken: int = 0) -> None:
        """Begin to show the training of a run. ``taken`` is the number of steps before the run was resumed."""
        ...

    def on_attempts(self, done: int, total: int) -> None:
        """Show that ``done`` of the ``total`` attempts of a step or an evaluation are finished."""
        ...

    def on_step(self, report: StepReport) -> None: ...

    def finish(self) -> None:
        """End the display. A second call has no effect."""
        ...


class SilentProgress:
    def print_line(self, text: str) -> None:
        return None

    def start(self, steps: int, taken: int = 0) -> None:
        return None

    def on_attempts(self, done: int, total: int) -> None:
        return None

    def on_step(self, report: StepReport) -> None:
        return None

    def finish(self) -> None:
        return None


class LineProgress(SilentProgress):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps, self._taken, self._began = 0, 0, 0.0

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()

    def on_step(self, report: StepReport) -> None:
        self.print_line(format_step(report, self._steps, time.monotonic() - self._began, self._taken))


class ProgressBar:
    """A display for terminals: a line for each step, and below a bar of the steps, or of an evaluation's groups."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._now = ""
        self._steps, self._taken, self._began = 0, 0, 0.0

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def start(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()
        self._open(f"step {taken}/{steps}", steps, taken)
        self._update(f"{self._now}  sampling")

    def on_attempts(self, done: int, total: int) -> None:
        counted = f"{done} of {total} attempts"
        if self._steps:
            self._update(f"{self._now}  {counted}" if done < total else f"{self._now}  updating")
            return
        if self._bar is None:  # an evaluation
            self._open(counted, total)
        self._update(counted, done)
        if done >= total:
            self._close()

    def on_step(self, report: StepReport) -> None:
        line = format_step(report, self._steps, time.monotonic() - self._began, self._taken)
        self.print_line(line)
        self._now = f"step {report.step}/{self._steps}"
        self._update(f"{self._now}  sampling", report.step)

    def finish(self) -> None:
        self._steps = 0
        self._close()

    def _open(self, text: str, total: int, done: int = 0) -> None:
        description = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), description, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar, self._now = Bar(*columns, console=self._console, transient=True), text
        self._task = self._bar.add_task(text, total=total, completed=done)
        self._bar.start()

    def _update(self, text: str, done: int | None = None) -> None:
        assert self._bar is not None and self._task is not None, "a step was shown before start"
        self._bar.update(self._task, completed=done, description=text)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def format_step(report: StepReport, steps: int, elapsed: float, taken: int = 0) -> str:
    """Return the results of a step as one line, with an estimate of the time left.

    ``elapsed`` has the seconds since the run was started or resumed. ``taken`` is the number of steps before the
    resume.

    Example:
        >>> format_step(StepReport(3, 0.5, 0.25, 1234.5, {"reward/f1": 0.4}), steps=12, elapsed=6.0)
        'step 3/12  reward 0.500  EM 0.250  f1 0.400  1234 tokens/s  18 s left'
    """
    left = elapsed / (report.step - taken) * (steps - report.step)
    if "sft_loss" in report.metrics and "reward" not in report.metrics:  # of transcripts
        shown = [f"step {report.step}/{steps}", f"loss {report.metrics['sft_loss']:.4f}"]
        if "validation_loss" in report.metrics:
            shown.append(f"validation {report.metrics['validation_loss']:.4f}")
        return "  ".join([*shown, f"{report.tokens_per_second:.0f} tokens/s", f"{format_duration(left)} left"])
    shown = [f"step {report.step}/{steps}", f"reward {report.reward:z.3f}"]
    shown += [] if report.em is None else [f"EM {report.em:z.3f}"]
    means = {key.removeprefix(REWARD_MEAN): mean for key, mean in report.metrics.items() if key.startswith(REWARD_MEAN)}
    shown += [
        f"{name} {mean:z.3f}" for name, mean in means.items() if report.em is None or name not in EXACT_MATCH_NAMES
    ]
    if "entropy" in report.metrics:
        shown.append(f"entropy {report.metrics['entropy']:.2f}")
    if report.metrics.get("constant_groups", 0.0) > 0:
        shown.append(f"equal groups {report.metrics['constant_groups']:.0%}")
    if "kl_reference" in report.metrics:
        shown.append(f"KL {report.metrics['kl_reference']:z.3f}")
    if "validation_em" in report.metrics:
        subsets = {
            key.removeprefix(VALIDATION_SUBSET): em
            for key, em in report.metrics.items()
            if key.startswith(VALIDATION_SUBSET)
        }
        parts = f" ({', '.join(f'{name} {em:z.3f}' for name, em in subsets.items())})" if subsets else ""
        shown.append(f"validation {report.metrics['validation_em']:z.3f}{parts}")
    if "critic/explained_variance" in report.metrics:
        shown.append(f"explained variance {report.metrics['critic/explained_variance']:z.2f}")
    if report.metrics.get("logprob_gap", 0.0) >= 1e-3:  # rounding in float32 makes it about 1e-6
        shown.append(f"log-prob gap {report.metrics['logprob_gap']:.3f}")
    return "  ".join([*shown, f"{report.tokens_per_second:.0f} tokens/s", f"{format_duration(left)} left"])


def format_duration(seconds: float) -> str:
    """Return a duration as text: seconds, minutes with seconds, or hours with minutes."""
    whole = round(seconds)
    minutes = whole // 60
    if whole < 60:
        return f"{whole} s"
    return f"{minutes} m {whole % 60:02d} s" if whole < 3600 else f"{minutes // 60} h {minutes % 60:02d} m"


def make_progress(console: Console) -> Progress:
    return ProgressBar(console) if console.is_terminal else LineProgress(console)
