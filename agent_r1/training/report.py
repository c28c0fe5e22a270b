"""What training and evaluation tell: progress while they run, the table of methods when they end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table as Grid

EXACT_MATCH = "exact match"
"""What a table measures, where a world does not say otherwise."""

NORMAL_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one split: mean exact match, F1 and sub-match over ``n`` questions.

    ``sub`` is None where a world reports no sub-match: whether a right answer stands somewhere in the one given.
    ``low`` and ``high`` bound the exact match, a 95 % Wilson interval (a normal one where a world without
    exact match is measured by a reward that is neither 0 nor 1).

    Example:
        Cell(em=0.9, f1=0.93, n=200, low=0.8505, high=0.9343)
    """

    em: float
    f1: float
    n: int
    low: float
    high: float
    sub: float | None = None


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The chance, by split, that of ``k`` sampled attempts at a question one is right: pass@k.

    It is estimated from ``attempts`` at each question; ``ones`` is pass@1 from the same ones.
    """

    k: int
    shares: Mapping[str, float]
    attempts: int
    ones: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells by method and split, and the retriever's measures by split and name (``recall@5``).

    ``measure`` says what the cells' ``em`` is where a world has no exact match: its reward. ``measures`` are the
    world's own, by method, split and name (``fix_rate``); ``passed`` is pass@k by method, where it was asked for.
    """

    cells: Mapping[str, Mapping[str, Cell]]
    retrieval: Mapping[str, Mapping[str, float]]
    measure: str = EXACT_MATCH
    measures: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    passed: Mapping[str, PassAtK] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the world reports exact match, and with it F1."""
        return self.measure == EXACT_MATCH


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training run came to. ``pass_at_k`` is the base model's, None where it was not measured.

    ``train_seconds`` are those of the steps after ``resumed_from``, where the run went on the last time.
    """

    run: Path
    steps: int
    train_seconds: float
    table: Table
    pass_at_k: PassAtK | None = None
    resumed_from: int = 0


class Answered(Protocol):
    """How one attempt was scored."""

    @property
    def em(self) -> float: ...

    @property
    def f1(self) -> float: ...

    @property
    def sub(self) -> float | None: ...


def cell_of(answers: Sequence[Answered]) -> Cell:
    """The cell of a method's answers. Raises ValueError where there are none."""
    if not answers:
        raise ValueError("a cell needs at least one answer")
    n = len(answers)
    em = sum(answer.em for answer in answers) / n
    low, high = wilson(em, n) if all(answer.em in (0, 1) for answer in answers) else normal([a.em for a in answers])
    subs = [answer.sub for answer in answers if answer.sub is not None]
    # A failed attempt has no sub-match of its own; where others have one it counts as wrong, as in em and F1.
    return Cell(em, sum(answer.f1 for answer in answers) / n, n, low, high, sum(subs) / n if subs else None)


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share seen in ``n`` trials (Wilson 1927): never outside 0..1, sound at 0 and at 1.

    Example:
        >>> wilson(1.0, 200)
        (0.9811..., 1.0)
    """
    z2 = NORMAL_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (max(0.0, middle - half) if share > 0 else 0.0), (min(1.0, middle + half) if share < 1 else 1.0)


def normal(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean by the normal distribution; a single value says nothing of its spread.

    Example:
        >>> normal([0.5, -0.5, 0.5, -0.5])
        (-0.565..., 0.565...)
    """
    mean = statistics.fmean(values)
    half = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half


def table_json(table: Table) -> dict[str, Any]:
    """The JSON of ``eval``: ``{"table": {method: {split: {em, f1, n, low, high}}}, "retrieval": {split: {..}}}``.

    A cell has ``sub`` too where the world reports a sub-match. ``measures`` and ``pass_at_k``, by method, are there
    where there are any.
    """
    cells = {method: {split: _cell_json(cell) for split, cell in row.items()} for method, row in table.cells.items()}
    data: dict[str, Any] = {"table": cells, "retrieval": {split: dict(some) for split, some in table.retrieval.items()}}
    if table.measures:
        data["measures"] = {
            method: {split: dict(some) for split, some in row.items()} for method, row in table.measures.items()
        }
    if table.passed:
        data["pass_at_k"] = {method: asdict(passed) for method, passed in table.passed.items()}
    return data


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in asdict(cell).items() if value is not None}


def report_json(report: TrainReport) -> dict[str, Any]:
    """The JSON of ``train``: that of its table, and how it came about."""
    base = None if report.pass_at_k is None else asdict(report.pass_at_k)
    about = {"run": str(report.run), "steps": report.steps, "train_seconds": report.train_seconds, "pass_at_k": base}
    return table_json(report.table) | about


def render(table: Table) -> Group:
    """The table for a terminal: methods down, splits across; the measure (95 % interval), and F1 where there is one."""
    splits = list(dict.fromkeys(split for row in table.cells.values() for split in row))
    grid = Grid("method", *(escape(split) for split in splits), box=box.SIMPLE_HEAD, caption=_caption(table))
    for method, row in table.cells.items():
        grid.add_row(escape(method), *(_shown(row[split], table.exact) if split in row else "-" for split in splits))
    lines = [
        f"retrieval, {escape(split)}: " + ", ".join(f"{escape(name)} {value:.3f}" for name, value in measures.items())
        for split, measures in table.retrieval.items()
    ]
    lines += [
        f"{escape(method)}, {escape(split)}: "
        + ", ".join(f"{escape(name)} {value:.2f}" for name, value in some.items())
        for method, row in table.measures.items()
        for split, some in row.items()
        if some
    ]
    lines += [line for method, passed in table.passed.items() for line in _pass_lines(escape(method), passed)]
    return Group(grid, *lines)


def _pass_lines(method: str, passed: PassAtK) -> list[str]:
    return [
        f"{method}, pass@1 and pass@{passed.k} of {passed.attempts} attempts: "
        + ", ".join(f"{escape(split)} {passed.ones[split]:.2f} {share:.2f}" for split, share in passed.shares.items())
    ]


def render_report(report: TrainReport) -> Group:
    """A training run for a terminal: its table, what the base model could do, where it all lies."""
    lines = [] if report.pass_at_k is None else _pass_lines("base model", report.pass_at_k)
    since = f", those after step {report.resumed_from}" if report.resumed_from else ""
    where = f"{report.steps} steps{since} in {report.train_seconds:.1f} s, all in {escape(str(report.run))}"
    return Group(render(report.table), *lines, where)


def _caption(table: Table) -> str:
    counts = sorted({cell.n for row in table.cells.values() for cell in row.values()})
    sub = any(cell.sub is not None for row in table.cells.values() for cell in row.values())
    measures = f"{table.measure} (95 % interval)" + (", F1" if table.exact else "") + (", sub-match" if sub else "")
    return f"{measures}; questions: {' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))}"


def _shown(cell: Cell, exact: bool) -> str:
    if not exact:  # its F1 says the same
        return f"{cell.em:.2f} ({cell.low:.2f}-{cell.high:.2f})"
    sub = "" if cell.sub is None else f", sub {cell.sub:.2f}"
    return f"{cell.em:.2f} ({cell.low:.2f}-{cell.high:.2f})\nF1 {cell.f1:.2f}{sub}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, as a person follows it. ``em`` is None where no reward of that name exists."""

    step: int
    reward: float
    em: float | None
    tokens_per_second: float


class Progress(Protocol):
    """Tells a person how far the work is."""

    def say(self, text: str) -> None:
        """One line: what begins now, or what is worth knowing."""
        ...

    def begin(self, steps: int, taken: int = 0) -> None:
        """Training begins; it will take so many steps, of which so many are taken already."""
        ...

    def stepped(self, report: StepReport) -> None: ...

    def end(self) -> None:
        """Training is over, or was cut short. May be called again."""
        ...


class Silence:
    """Progress that nobody wants to see."""

    def say(self, text: str) -> None:
        return None

    def begin(self, steps: int, taken: int = 0) -> None:
        return None

    def stepped(self, report: StepReport) -> None:
        return None

    def end(self) -> None:
        return None


class Lines:
    """Progress as plain lines, one per step: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps, self._taken, self._began = 0, 0, 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()

    def stepped(self, report: StepReport) -> None:
        self.say(step_line(report, self._steps, time.monotonic() - self._began, self._taken))

    def end(self) -> None:
        return None


class LiveBar:
    """Progress as a bar that stays in its place: for terminals."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(BarColumn(), TextColumn("{task.description}", markup=False), console=console)
        self._console = console
        self._task: TaskID | None = None
        self._steps, self._taken, self._began = 0, 0, 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def begin(self, steps: int, taken: int = 0) -> None:
        self._steps, self._taken, self._began = steps, taken, time.monotonic()
        self._task = self._bar.add_task(f"step {taken}/{steps}", total=steps, completed=taken)
        self._bar.start()

    def stepped(self, report: StepReport) -> None:
        assert self._task is not None, "stepped before begin"
        line = step_line(report, self._steps, time.monotonic() - self._began, self._taken)
        self._bar.update(self._task, completed=report.step, description=line)

    def end(self) -> None:
        self._bar.stop()


def step_line(report: StepReport, steps: int, elapsed: float, taken: int = 0) -> str:
    """A step in one line; ``elapsed`` seconds ago ``taken`` steps were behind us.

    Example:
        >>> step_line(StepReport(3, 0.5, 0.25, 1234.5), steps=12, elapsed=6.0)
        'step 3/12  reward 0.500  EM 0.250  1234 tokens/s  0:18 left'
    """
    left = round(elapsed / (report.step - taken) * (steps - report.step))
    em = "" if report.em is None else f"  EM {report.em:.3f}"
    speed = f"{report.tokens_per_second:.0f} tokens/s"
    return f"step {report.step}/{steps}  reward {report.reward:.3f}{em}  {speed}  {left // 60}:{left % 60:02d} left"


def progress_on(console: Console) -> Progress:
    """The progress that suits a console: a bar on a terminal, lines elsewhere."""
    return LiveBar(console) if console.is_terminal else Lines(console)
