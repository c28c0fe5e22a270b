"""The report of a run in a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from agent_r1.core.profile import CPU_SECONDS, SECONDS, format_profile
from agent_r1.store.folder import path_argument, run_argument
from agent_r1.store.reader import RecordedEvent, TaskSummary
from agent_r1.tasksets import TRANSCRIPTS, is_available
from agent_r1.viewer.charts import PANELS, Curve, Curves
from agent_r1.viewer.report import CriticCalibration, RunReport, RunSummary, Validation
from agent_r1.viewer.text import duration, number, one_line, visible

BLOCKS = "▁▂▃▄▅▆▇█"
"""The eight levels of a sparkline, from low to high."""
ASCII_BLOCKS = "_.,-=+*#"
"""The eight levels of a sparkline without Unicode, from low to high."""

NAME_WIDTH, WIDE_NAME_WIDTH, VALUE_WIDTH, MAX_BLOCKS = 27, 40, 8, 60
"""Widths in a table of curves, in characters: names in a narrow terminal, names in a wide terminal, each number, and
the largest sparkline."""


def safe(text: str, style: str = "") -> Text:
    """Return ``text`` in a style such as "bold". Each control character is replaced by a visible character."""
    return Text(visible(text), style)


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a line of at most ``width`` blocks. The height of each block shows one value.

    If there are more than ``width`` values, a block shows the mean of neighboring values. A value that is not finite
    becomes a space.

    Example:
        >>> sparkline([0.0, 1.0, float("nan"), 2.0], 10)
        '▁▅ █'
    """
    count = min(len(values), width)
    bins = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [_mean(part) for part in bins]
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    top = len(blocks) - 1

    def block(mean: float | None) -> str:
        if mean is None:
            return " "
        return blocks[0 if high == low else round((mean - low) / (high - low) * top)]

    return "".join(map(block, means))


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


class CurveTable:
    """A table with one line per curve: name, sparkline, first, last, smallest and largest value."""

    def __init__(self, width: int, steps: int, blocks: str) -> None:
        self._blocks = blocks
        self._names = NAME_WIDTH if width < 100 else WIDE_NAME_WIDTH
        self._room = max(6, min(steps, MAX_BLOCKS, width - self._names - 4 * VALUE_WIDTH - 6))
        heading = self._grid()
        heading.add_row("", "", *(Text(name, "dim") for name in ("first", "last", "min", "max")))
        self._parts: list[RenderableType] = [heading]

    def add_panel(self, title: str, unit: str, curves: Sequence[tuple[str, Curve]]) -> None:
        """Add the curves (name, curve) of one chart below its title. A single curve of that name is one line."""
        name, grid = Text.assemble((title, "bold"), (f"  {unit}", "dim")), self._grid()
        label = curves[0][0]
        if len(curves) == 1 and (label in f"{title} {unit}".lower() or title.lower() in label):
            self._add(grid, name if name.cell_len <= self._names else Text(title, "bold"), curves[0][1])
        else:
            self._parts.append(name)
            for label, curve in curves:
                self._add(grid, safe(f"  {label}"), curve)
        self._parts.append(grid)

    def rendered(self) -> Group:
        return Group(*self._parts)

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=self._names, no_wrap=True, overflow="ellipsis")
        grid.add_column(width=self._room, no_wrap=True, overflow="ellipsis")
        for _ in range(4):
            grid.add_column(width=VALUE_WIDTH, no_wrap=True, justify="right")
        return grid

    def _add(self, grid: Table, name: Text, curve: Curve) -> None:
        values = [curve[step] for step in sorted(curve)]
        finite = [value for value in values if math.isfinite(value)]
        shown = (values[0], values[-1], min(finite, default=math.nan), max(finite, default=math.nan))
        # A constant needs no curve, and among curves it would look like one that is low.
        line = Text("" if shown[2] == shown[3] else sparkline(values, self._room, self._blocks), "cyan")
        grid.add_row(name, line, *(Text(_short_number(value)) for value in shown))


def _short_number(value: float) -> str:
    text = number(value, 3)
    return text if len(text) <= VALUE_WIDTH else number(value, 2)


MAX_EVENTS = 6

_RESULT_KINDS = frozenset({"validation", "fingerprint", "checkpoint_saved"})
"""The kinds of events that are not printed, because another part of the screen shows them, or because they are data."""

_STATES = {"complete": "green", "training": "cyan", "stopped": "yellow", "failed": "red"}


@dataclass(frozen=True, slots=True)
class RunText:
    report: RunReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self.report
        yield _head(report)
        yield ""
        yield _facts(report)
        if report.table:
            yield ""
            yield _results(report)
        if report.curves:
            yield ""
            yield _curves(report.curves, options.max_width, ASCII_BLOCKS if options.ascii_only else BLOCKS)
        if report.critic is not None:
            yield ""
            yield from _critic(report.critic)
        if report.profile:
            yield Text(format_profile(report.profile, "Profile of an average step"))
            yield ""
        events = [event for event in report.events if event.event.kind not in _RESULT_KINDS]
        if events:
            yield Text("Last events", "bold")
            yield _events(events[-MAX_EVENTS:])
        yield ""
        yield _hints(report)


def _head(report: RunReport) -> Text:
    summary = report.summary
    parts = [f"step {summary.step} of {summary.steps}", duration(summary.seconds)]
    if summary.state == "training":
        parts.append(f"process {summary.process}")
        parts.append(f"last record {duration(max(0.0, time.time() - summary.updated))} ago")
    elif summary.detail:
        parts.append(one_line(summary.detail))
    text = Text.assemble((summary.name, "bold"), "  ", (summary.state, f"bold {_STATES[summary.state]}"))
    return text.append_text(Text("  " + " · ".join(parts)))


def _facts(report: RunReport) -> Table:
    summary = report.summary
    settings = "  ".join(f"{setting.key}={_value(setting.value)}" for setting in report.settings)
    fates = {str(fate): count for fate, count in report.fates.items()}
    rows = {
        "folder": str(summary.folder),
        "task set": summary.taskset + (f" ({report.file})" if report.file else ""),
        "model": summary.model,
        "parent": "{run}, step {step} (weights {weights:.12}..)".format(**report.parent) if report.parent else "",
        "algorithm": summary.algorithm,
        "not default": settings or "nothing",
        "machine": _machine_text(report.hardware),
        "attempts": f"{summary.attempts:,}: {_counts(fates)}" if summary.attempts else "none yet",
        "endings": _counts({status.value: count for status, count in report.statuses.items()}),
        "validation": _validation_text(report),
        "warnings": str(report.warnings) if report.warnings else "",
    }
    grid = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, text in rows.items():
        if text:
            grid.add_row(name, safe(text))
    return grid


def _machine_text(hardware: Mapping[str, Any]) -> str:
    if not hardware:
        return ""
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    return f"{hardware['processor']}, {hardware['cores']} cores, {gpus}, torch {hardware['torch']}"


def _value(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value), 60)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())


def _validation_text(report: RunReport) -> str:
    last, best = report.last, report.best
    if last is None or best is None:
        return ""
    measure = "probability of a token" if report.summary.taskset == TRANSCRIPTS else "EM"
    text = f"{measure} {_with_interval(last)} at step {last.step}"
    if best.step != last.step:
        text += f", best {_with_interval(best)} at step {best.step}"
    else:
        text += ", the best"
    return f"{text} ({report.best_checkpoint})" if report.best_checkpoint else text


def _with_interval(validation: Validation) -> str:
    if validation.low is None or validation.high is None:
        return f"{validation.em:z.3f}"
    return f"{validation.em:z.3f} ({validation.low:z.2f}-{validation.high:z.2f})"


def _results(report: RunReport) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    heading = Text.assemble(("Results", "bold"), (f"  {visible(report.measure)}", "dim"))
    grid.add_row(heading, *(safe(split, "dim") for split in report.splits))
    for method, cells in report.table.items():
        values = (f"{cells[split]['em']:z.3f}" if split in cells else "" for split in report.splits)
        grid.add_row(safe(f"  {method}"), *values)
    return grid


def _curves(curves: Curves, width: int, blocks: str) -> RenderableType:
    curves = {name: curve for name, curve in curves.items() if not name.startswith((SECONDS, CPU_SECONDS))}
    found = CurveTable(width, max(map(len, curves.values())), blocks)
    for panel in PANELS:
        selected = [(label, curve) for label, curve in panel.select(curves) if curve]
        if selected:
            found.add_panel(panel.title, panel.unit, selected)
    return found.rendered()


def _critic(critic: CriticCalibration) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    names = ("states before", "states", "mean value", "mean reward after", "explained variance")
    for name in names:
        grid.add_column(justify="left" if name == names[0] else "right", no_wrap=True)
    grid.add_row(*(Text(name, "dim") for name in names))
    for row in critic.rows:
        explained = "-" if math.isnan(row.explained) else number(row.explained, 3)
        grid.add_row(f"  {row.name}", f"{row.count:,}", number(row.value, 3), number(row.reward, 3), explained)
    yield Text.assemble(("Values of states", "bold"), f"  calibration error {number(critic.calibration_error, 3)}")
    yield grid


def _events(events: Sequence[RecordedEvent]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for event in events:
        style = {"warning": "yellow", "stopped": "red", "completed": "green"}.get(event.event.kind, "")
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        grid.add_row(Text(f"  {clock}", "dim"), safe(event.event.kind, style), Text(one_line(event.event.detail, 400)))
    return grid


def task_table(tasks: Sequence[TaskSummary]) -> Table:
    """Return one row per task with its number of attempts and their rewards, for a terminal."""
    grid = Table(box=None, pad_edge=False)
    for name in ("task", "split", "attempts", "failed", "mean reward", "above 0", "last reward"):
        grid.add_column(name, justify="left" if name in ("task", "split") else "right")
    for one in tasks:
        rewards = (one.reward, one.above_zero, one.last)
        shown = ["-" if value is None else number(value, 3) for value in rewards]
        grid.add_row(safe(one.task), safe(one.split), f"{one.attempts:,}", f"{one.failed:,}", *shown)
    return grid


def run_table(runs: Sequence[RunSummary]) -> Table:
    """Return one row per run, for a terminal. A run that cannot be read has its error instead."""
    grid = Table(box=None, pad_edge=False)
    for name in ("run", "task set", "step", "reward", "changed"):
        grid.add_column(name, justify="left" if name in ("run", "task set") else "right")
    for one in runs:
        ago = f"{duration(max(0.0, time.time() - one.updated))} ago"
        cells = [one.taskset, f"{one.step}/{one.steps}", number(one.reward, 3), ago]
        grid.add_row(*map(safe, [one.name, *([one.error] if one.error else cells)]))
    return grid


def _hints(report: RunReport) -> Text:
    run = run_argument(report.summary.folder)
    lines = [_resume_command(report)] if report.summary.state in ("stopped", "failed") else []
    lines += [f"agent-r1 show {run} worst"] if report.summary.attempts else []
    return Text("\n".join([*lines, f"agent-r1 view {run}"]), "dim")


def _resume_command(report: RunReport) -> str:
    """Return the command, or the Python call, that continues the run."""
    run = run_argument(report.summary.folder)
    if report.file is not None:
        return f"agent-r1 train {path_argument(report.file)} --run {run} --resume"
    if is_available(report.summary.taskset):
        return f"agent-r1 train --run {run} --resume"
    return f"agent_r1.train(env, tasks, run={str(report.summary.folder)!r}, resume=True)"
