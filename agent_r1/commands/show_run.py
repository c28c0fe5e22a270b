"""The report of a run: its settings and state, its attempts, its curves, and its last events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from agent_r1.core.profile import CPU_SECONDS, PARTS, SECONDS, format_profile, mean_profile
from agent_r1.store.folder import path_argument, run_argument
from agent_r1.store.reader import RecordedEvent, RunReader, read_file, read_hardware, read_results
from agent_r1.store.writer import writing_process
from agent_r1.tasksets import is_available
from agent_r1.viewer.catalog import RunSummary, read_curves, summarize_reader
from agent_r1.viewer.charts import PANELS
from agent_r1.viewer.tables import Setting, own_settings
from agent_r1.viewer.text import duration, number, one_line, visible

BLOCKS = "▁▂▃▄▅▆▇█"
"""The eight levels of a sparkline, from low to high."""
ASCII_BLOCKS = "_.,-=+*#"
"""The eight levels of a sparkline without Unicode, from low to high."""

NAME_WIDTH, WIDE_NAME_WIDTH, VALUE_WIDTH, MAX_BLOCKS = 27, 40, 8, 60
"""Widths in a table of curves, in characters: names in a narrow terminal, names in a wide terminal, each number, and
the largest sparkline."""

Curve = Mapping[int, float]
"""The values of a metric by step."""


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
    """A table with one line per curve: name, sparkline, first value, last value, smallest value, largest value.

    ``steps`` is the number of values of the longest curve. ``blocks`` are the characters of the sparklines.
    """

    def __init__(self, width: int, steps: int, blocks: str) -> None:
        self._blocks = blocks
        self._names = NAME_WIDTH if width < 100 else WIDE_NAME_WIDTH
        self._room = max(6, min(steps, MAX_BLOCKS, width - self._names - 4 * VALUE_WIDTH - 6))
        heading = self._grid()
        heading.add_row("", "", *(Text(name, "dim") for name in ("first", "last", "min", "max")))
        self._parts: list[RenderableType] = [heading]

    def add_panel(self, title: str, unit: str, curves: Sequence[tuple[str, Curve]]) -> None:
        """Add the curves of one chart: a line with the title and the unit, and a line for each curve.

        If there is only one curve and its name repeats the title, both lines become one. ``curves`` are pairs (name,
        curve).
        """
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
        line = Text(sparkline(values, self._room, self._blocks), "cyan")
        grid.add_row(name, line, *(Text(_short_number(value)) for value in shown))


def _short_number(value: float) -> str:
    text = number(value, 3)
    return text if len(text) <= VALUE_WIDTH else number(value, 2)


MAX_EVENTS = 6
_EVENTS_READ = 2000
_RESULT_KINDS = frozenset({"tools", "file", "hardware", "validation", "table", "fingerprint", "checkpoint_saved"})
"""The kinds of events that the report leaves out of its list of events. Events of these kinds hold data, or
another part of the report shows them."""

_STATES = {"complete": "green", "training": "cyan", "stopped": "yellow", "failed": "red"}


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of one validation.

    Attributes:
        em: the share of right answers.
        low: the lower end of the 95 % interval of ``em``; None if not recorded.
        high: the upper end of the 95 % interval of ``em``; None if not recorded.
    """

    step: int
    em: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """The content of ``agent-r1 show RUN``.

    Attributes:
        process: the id of the process that writes the run; None if not known.
        seconds: the time from the start of the run to its last event, or to now if the run is still training.
        settings: the settings that differ from their defaults.
        fates: the number of attempts by fate ("trained", "dropped", ..).
        best_checkpoint: the folder with the weights of the best validation; None if the folder does not exist.
        table: the share of right answers at the end of the run: ``table[method][split]``. A method is a baseline, the
            base model or the trained agent.
        curves: the values by step of each metric and timing.
        file: the Python file that defines the task set, if any.
        hardware: the processor, the GPUs and so on of the last start or resumption; {} if not recorded.
        profile: the seconds of each part of an average step by metric name, empty if the run was not profiled.
        events: the last warnings and other events, oldest first.
    """

    folder: Path
    summary: RunSummary
    process: int | None
    seconds: float
    settings: tuple[Setting, ...]
    fates: Mapping[str, int]
    statuses: Mapping[str, int]
    last: Validation | None
    best: Validation | None
    best_checkpoint: Path | None
    table: Mapping[str, Mapping[str, float]]
    curves: Mapping[str, Curve]
    file: Path | None
    hardware: Mapping[str, Any]
    profile: Mapping[str, float]
    events: tuple[RecordedEvent, ...]
    warnings: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object.

        Example:
            {"run": "runs/demo", "state": "complete", .., "validation": {"last": .., "best": ..}, "curves": .., ..}
        """
        summary = self.summary
        return {
            "run": str(self.folder),
            "state": summary.state,
            "detail": summary.detail,
            "seconds": self.seconds,
            "step": summary.step,
            "steps": summary.steps,
            "taskset": summary.taskset,
            "file": None if self.file is None else str(self.file),
            "model": summary.model,
            "algorithm": summary.algorithm,
            "settings": {setting.key: setting.value for setting in self.settings},
            "attempts": summary.attempts,
            "fates": dict(self.fates),
            "statuses": dict(self.statuses),
            "validation": {"last": self.last and asdict(self.last), "best": self.best and asdict(self.best)},
            "best_checkpoint": None if self.best_checkpoint is None else str(self.best_checkpoint),
            "table": {method: dict(cells) for method, cells in self.table.items()},
            "curves": {name: dict(curve) for name, curve in self.curves.items()},
            "hardware": dict(self.hardware),
            "profile": {
                part: {
                    "seconds": self.profile[SECONDS + part],
                    "cpu_seconds": self.profile.get(CPU_SECONDS + part, 0.0),
                }
                for part in PARTS
                if SECONDS + part in self.profile
            },
            "warnings": self.warnings,
            "events": [{"time": event.time, "segment": event.segment, **asdict(event.event)} for event in self.events],
        }


def read_report(folder: Path, reader: RunReader, defaults: Mapping[str, Any]) -> RunReport:
    """Return the report of the run in ``folder``. ``defaults`` holds the default of each setting by dotted key."""
    summary, curves = summarize_reader(folder.resolve().name, folder, reader), read_curves(reader)
    events = reader.recent_events(_EVENTS_READ)
    shown = [event for event in events if event.event.kind not in _RESULT_KINDS]
    validations = list(_validations(reader, curves))
    best = max(validations, key=lambda one: (one.em, one.step), default=None)
    checkpoint = None if best is None else folder / "checkpoints" / f"step-{best.step}"
    tables = list(read_results(reader, "table"))
    return RunReport(
        folder=folder,
        summary=summary,
        process=writing_process(folder),
        seconds=time.time() - reader.segments()[0].time if summary.state == "training" else summary.seconds,
        settings=own_settings(reader.config(), {**defaults, "run": reader.config().get("run")}),
        fates={str(fate): count for fate, count in reader.count_fates().items()},
        statuses={status.value: count for status, count in reader.count_statuses().items()},
        last=validations[-1] if validations else None,
        best=best,
        best_checkpoint=checkpoint if checkpoint is not None and checkpoint.is_dir() else None,
        table=_em_table(tables[-1]) if tables else {},
        curves=curves,
        file=read_file(reader),
        hardware=read_hardware(reader),
        profile=mean_profile(curves),
        events=tuple(shown[-MAX_EVENTS:]),
        warnings=sum(event.event.kind == "warning" for event in events),
    )


def _validations(reader: RunReader, curves: Mapping[str, Curve]) -> Iterator[Validation]:
    cells = {cell["step"]: cell for cell in read_results(reader, "validation")}
    for step, em in sorted(curves.get("validation_em", {}).items()):
        cell = cells.get(step, {})
        yield Validation(step, em, cell.get("low"), cell.get("high"))


def _em_table(recorded: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        method: {split: float(cell["em"]) for split, cell in cells.items()}
        for method, cells in recorded["table"].items()
    }


@dataclass(frozen=True, slots=True)
class RunText:
    report: RunReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _head(self.report)
        yield ""
        yield _facts(self.report)
        if self.report.table:
            yield ""
            yield _results(self.report.table)
        if self.report.curves:
            yield ""
            yield _curves(self.report.curves, options.max_width, ASCII_BLOCKS if options.ascii_only else BLOCKS)
        if self.report.profile:
            yield Text(format_profile(self.report.profile, "Profile of an average step"))
            yield ""
        if self.report.events:
            yield Text("Last events", "bold")
            yield _events(self.report.events)
        yield ""
        yield _hints(self.report)


def _head(report: RunReport) -> Text:
    summary = report.summary
    parts = [f"step {summary.step} of {summary.steps}", duration(report.seconds)]
    if summary.state == "training":
        parts.append(f"process {report.process}")
        parts.append(f"last record {duration(max(0.0, time.time() - summary.updated))} ago")
    elif summary.detail:
        parts.append(one_line(summary.detail))
    text = Text.assemble((summary.name, "bold"), "  ", (summary.state, f"bold {_STATES[summary.state]}"))
    return text.append_text(Text("  " + " · ".join(parts)))


def _facts(report: RunReport) -> Table:
    summary = report.summary
    settings = "  ".join(f"{setting.key}={_value(setting.value)}" for setting in report.settings)
    rows = {
        "folder": str(report.folder),
        "task set": summary.taskset + (f" ({report.file})" if report.file else ""),
        "model": summary.model,
        "algorithm": summary.algorithm,
        "not default": settings or "nothing",
        "machine": _machine_text(report.hardware),
        "attempts": f"{summary.attempts:,}: {_counts(report.fates)}" if summary.attempts else "none yet",
        "endings": _counts(report.statuses),
        "validation": _validation_text(report),
        "warnings": str(report.warnings) if report.warnings else "",
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
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
    text = f"EM {_with_interval(last)} at step {last.step}"
    if best.step != last.step:
        text += f", best {_with_interval(best)} at step {best.step}"
    else:
        text += ", the best"
    return f"{text} ({report.best_checkpoint})" if report.best_checkpoint else text


def _with_interval(validation: Validation) -> str:
    if validation.low is None or validation.high is None:
        return f"{validation.em:z.3f}"
    return f"{validation.em:z.3f} ({validation.low:z.2f}-{validation.high:z.2f})"


def _results(table: Mapping[str, Mapping[str, float]]) -> Table:
    splits = list(dict.fromkeys(split for cells in table.values() for split in cells))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(Text("Results", "bold"), *(safe(split, "dim") for split in splits))
    for method, cells in table.items():
        values = (f"{cells[split]:z.3f}" if split in cells else "" for split in splits)
        grid.add_row(safe(f"  {method}"), *values)
    return grid


def _curves(curves: Mapping[str, Curve], width: int, blocks: str) -> RenderableType:
    curves = {name: curve for name, curve in curves.items() if not name.startswith((SECONDS, CPU_SECONDS))}
    found = CurveTable(width, max(map(len, curves.values())), blocks)
    for panel in PANELS:
        selected = [(label, curve) for label, curve in panel.select(curves) if curve]
        if selected:
            found.add_panel(panel.title, panel.unit, selected)
    return found.rendered()


def _events(events: Sequence[RecordedEvent]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for event in events:
        style = {"warning": "yellow", "stopped": "red", "completed": "green"}.get(event.event.kind, "")
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        grid.add_row(Text(f"  {clock}", "dim"), safe(event.event.kind, style), Text(one_line(event.event.detail, 400)))
    return grid


def _hints(report: RunReport) -> Text:
    run = run_argument(report.folder)
    lines = [f"agent-r1 view {run}"]
    if report.summary.attempts:
        lines = [f"agent-r1 show {run} --attempts", f"agent-r1 show {run} worst", *lines]
    if report.curves:
        lines.insert(0, f"agent-r1 show {run} --metric reward")
    if report.summary.state in ("stopped", "failed"):
        lines.insert(0, _resume_command(report))
    return Text("\n".join(lines), "dim")


def _resume_command(report: RunReport) -> str:
    """Return the command, or the Python call, that continues the run."""
    run = run_argument(report.folder)
    if report.file is not None:
        return f"agent-r1 train {path_argument(report.file)} --run {run} --resume"
    if is_available(report.summary.taskset):
        return f"agent-r1 train --run {run} --resume"
    return f"agent_r1.train(env, tasks, run={str(report.folder)!r}, resume=True)"


@dataclass(frozen=True, slots=True)
class MetricText:
    """A table of one metric for the package ``rich``. Each row has a step, its value, and a bar."""

    name: str
    curve: Curve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        finite = [value for value in self.curve.values() if math.isfinite(value)]
        low, high = min([0.0, *finite]), max([0.0, *finite])
        room = max(10, min(60, options.max_width - 24))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(justify="right")
        grid.add_column(justify="right")
        grid.add_row(Text("step", "dim"), safe(self.name, "bold"))
        for step, value in self.curve.items():
            share = (value - low) / (high - low) if math.isfinite(value) and high > low else 0.0
            bar = ("#" if options.ascii_only else "█") * round(share * room)
            grid.add_row(str(step), number(value, 6), Text(bar, "cyan"))
        yield grid
