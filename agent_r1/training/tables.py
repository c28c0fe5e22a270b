"""The table that compares the trained agent with the baselines."""

from __future__ import annotations

import html
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table as Grid

from agent_r1.rollout.api_agent import ApiUsage
from agent_r1.store.frames import table_frame
from agent_r1.training.metrics import EXACT_MATCH, EvalResult

if TYPE_CHECKING:
    import pandas

TEXT_WIDTH = 120
NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of one method on one split. All means are over the attempts that could be scored.

    Attributes:
        em: the mean exact match, or the mean reward if the task set reports no exact match.
        f1: the mean F1.
        n: the number of scored attempts, one for each question.
        low, high: the ends of the 95 % confidence interval of ``em``. The interval is Wilson's if all values are 0 or
            1, otherwise normal.
        sub: the share of answers that contain a right answer (sub-match); None if there is no sub-match.
        failed: the number of attempts that failed or could not be scored.
    """

    em: float
    f1: float
    n: int
    low: float
    high: float
    sub: float | None = None
    failed: int = 0


@dataclass(frozen=True, slots=True)
class SampledCell:
    """The results of one method on one split, from several sampled attempts at each question.

    All values are means over the questions.

    Attributes:
        one: pass@1, the exact match of an attempt.
        low, high: the ends of the 95 % confidence interval of pass@1 (normal approximation).
        any: pass@k, the probability that at least one of k attempts is right.
        majority: the exact match of the most frequent answer; None if no attempt gives an answer in ``<answer>`` tags.
        likeliest: the exact match of the attempt with the highest mean log-probability per token; None behind an API.
    """

    one: float
    low: float
    high: float
    any: float
    majority: float | None
    likeliest: float | None


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The results of one method, if several attempts are sampled at each question."""

    k: int  # the k of pass@k
    attempts: int  # the number of attempts at each question
    cells: Mapping[str, SampledCell]  # the results by split


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The greedy attempt of a method at one task."""

    method: str
    split: str
    task: str  # the id of the task
    status: str
    em: float | None  # as in the cells of the table; None if the attempt failed or could not be scored
    rewards: Mapping[str, float | None]  # the total of each reward
    answer: str | None
    failure: str | None  # why the attempt failed or could not be scored


@dataclass(frozen=True, slots=True)
class Table:
    """A result table. Each row is a method: a baseline, the base model, or the trained agent."""

    cells: Mapping[str, Mapping[str, Cell | None]]  # the results by method and split; None: every attempt failed
    # the measures of the retriever, by split and by name such as ``recall@5``
    retrieval: Mapping[str, Mapping[str, float]]
    # what the attribute ``em`` of each cell measures: "exact match", or a reward such as "reward 'solved'"
    measure: str = EXACT_MATCH
    # further measures of the task set, by method, by split and by name such as ``fix_rate``
    measures: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    passed: Mapping[str, PassAtK] = field(default_factory=dict)  # pass@k by method
    tasks: tuple[TaskResult, ...] = ()  # the attempts that the cells summarize
    usage: Mapping[str, ApiUsage] = field(default_factory=dict)  # the tokens of models behind an API, by method

    def __str__(self) -> str:
        return _as_text(render_table(self))

    def _repr_html_(self) -> str:  # notebooks show an object so
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per method and split: the columns method, split, em, low, high, f1, n and more."""
        return table_frame(table_json(self)["table"])

    @property
    def exact(self) -> bool:
        """Whether the number ``em`` in each cell is exact match. If not, ``em`` is a reward."""
        return self.measure == EXACT_MATCH


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of a training run."""

    run: Path  # the folder of the run
    steps: int  # the number of optimizer steps
    train_seconds: float  # the seconds of training since the run was started or last resumed
    table: Table
    pass_at_k: PassAtK | None = None  # pass@k of the base model; None if not measured
    resumed_from: int = 0  # the step from which the run was last resumed; 0 if the run was not resumed

    def __str__(self) -> str:
        return _as_text(render_report(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def make_cell(results: Sequence[EvalResult]) -> Cell | None:
    """Return the cell of a result table; None if every attempt failed. ``results`` has the result of each attempt."""
    # A failed attempt says nothing about the policy: as a zero it would look like a wrong answer.
    scored = [result for result in results if result.failure is None]
    if not scored:
        return None
    values = [result.em for result in scored]
    em = statistics.fmean(values)
    binary = all(value in (0, 1) for value in values)
    low, high = wilson_interval(em, len(scored)) if binary else normal_interval(values)
    subs = [result.sub for result in scored if result.sub is not None]
    f1, sub = statistics.fmean(result.f1 for result in scored), statistics.fmean(subs) if subs else None
    return Cell(em, f1, len(scored), low, high, sub, len(results) - len(scored))


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson (1927) for a probability, from the ``share`` of successes in ``n`` trials."""
    z2 = NORMAL_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return (max(0.0, middle - half) if share > 0 else 0.0), (min(1.0, middle + half) if share < 1 else 1.0)


def normal_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % normal interval (low, high) for the mean of ``values``. For a single value, low equals high."""
    mean = statistics.fmean(values)
    half = NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half


def table_json(table: Table) -> dict[str, Any]:
    """Return the JSON output of ``agent-r1 eval``: {method: {split: values}}, and ``retrieval`` {split: measures}."""
    cells = {method: {split: _cell_json(cell) for split, cell in row.items()} for method, row in table.cells.items()}
    retrieval = {split: dict(some) for split, some in table.retrieval.items()}
    data: dict[str, Any] = {"measure": table.measure, "table": cells, "retrieval": retrieval}
    if table.measures:
        data["measures"] = {
            method: {split: dict(some) for split, some in row.items()} for method, row in table.measures.items()
        }
    if table.passed:
        data["pass_at_k"] = {method: asdict(passed) for method, passed in table.passed.items()}
    if table.usage:
        data["usage"] = {method: asdict(usage) for method, usage in table.usage.items()}
    return data


def _cell_json(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    left_out = {"failed"} if cell.failed == 0 else set()
    return {name: value for name, value in asdict(cell).items() if value is not None and name not in left_out}


def render_tasks(table: Table) -> Grid:
    """Return one row per attempt of the table; "-" if it failed or was not scored."""
    grid = Grid("split", "task", "method", table.measure, box=box.SIMPLE_HEAD)
    for one in table.tasks:
        grid.add_row(*map(escape, (one.split, one.task, one.method, "-" if one.em is None else f"{one.em:z.2f}")))
    return grid


def report_json(report: TrainReport) -> dict[str, Any]:
    """Return the JSON output of ``agent-r1 train``."""
    base = None if report.pass_at_k is None else asdict(report.pass_at_k)
    about = {"run": str(report.run), "steps": report.steps, "train_seconds": report.train_seconds, "pass_at_k": base}
    return table_json(report.table) | about


def _as_text(shown: Group) -> str:
    # Also if FORCE_COLOR asks for colors: a text with escape codes is no use in a notebook, a file or a comparison.
    console = Console(width=TEXT_WIDTH, file=io.StringIO(), force_jupyter=False, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def render_table(table: Table) -> Group:
    """Return the table for a terminal: a row per method and a column per split."""
    splits = list(dict.fromkeys(split for row in table.cells.values() for split in row))
    # A narrow terminal breaks words that it has no room for. By default, it would cut them.
    heads = (Column(escape(name).replace("/", "/\n"), overflow="fold") for name in ("method", *splits))
    grid = Grid(*heads, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    grid.caption, grid.min_width = _caption(table), 20  # a table without rows would be narrower than its words
    for method, row in table.cells.items():
        grid.add_row(escape(method), *(_shown(row[split], table.exact) if split in row else "-" for split in splits))
    lines = [
        f"retrieval, {escape(split)}: " + ", ".join(f"{escape(name)} {value:.3f}" for name, value in measures.items())
        for split, measures in table.retrieval.items()
    ]
    lines += [
        f"{escape(method)}, {escape(split)}: "
        + ", ".join(f"{escape(name)} {value:z.2f}" for name, value in some.items())
        for method, row in table.measures.items()
        for split, some in row.items()
        if some
    ]
    lines += [line for method, passed in table.passed.items() for line in _pass_lines(escape(method), passed)]
    lines += [_usage_line(escape(method), usage) for method, usage in table.usage.items()]
    return Group(grid, *lines)


def _usage_line(method: str, usage: ApiUsage) -> str:
    tokens = f"{usage.prompt_tokens:,} prompt tokens and {usage.completion_tokens:,} completion tokens"
    without = f" ({usage.unreported:,} without their tokens)" if usage.unreported else ""
    cost = "" if usage.cost is None else f", cost {usage.cost:.4f}"
    return f"{method}: {tokens} in {usage.answers:,} answers{without}{cost}"


def _pass_lines(method: str, passed: PassAtK) -> list[str]:
    return [
        f"{method}, {escape(split)}, {passed.attempts} attempts at temperature 1: pass@1 {cell.one:z.2f} "
        f"({cell.low:z.2f}-{cell.high:z.2f}), pass@{passed.k} {cell.any:z.2f}, "
        f"majority {'-' if cell.majority is None else f'{cell.majority:z.2f}'}, "
        f"likeliest {'-' if cell.likeliest is None else f'{cell.likeliest:z.2f}'}"
        for split, cell in passed.cells.items()
    ]


def render_report(report: TrainReport) -> Group:
    """Return the report for a terminal: result table, pass@k of the base model, steps, seconds, folder of the run."""
    lines = [] if report.pass_at_k is None else _pass_lines("base model", report.pass_at_k)
    since = f", those after step {report.resumed_from}" if report.resumed_from else ""
    steps = f"{report.steps} step{'s' * (report.steps != 1)}{since}"
    where = f"{steps} in {report.train_seconds:.1f} s, all in {escape(str(report.run))}"
    return Group(*([render_table(report.table)] if report.table.cells else []), *lines, where)


def _caption(table: Table) -> str:
    cells = [cell for row in table.cells.values() for cell in row.values() if cell is not None]
    counts = sorted({cell.n + cell.failed for cell in cells})
    sub = any(cell.sub is not None for cell in cells)
    measures = f"{table.measure} (95 % interval)" + (", F1" if table.exact else "") + (", sub-match" if sub else "")
    asked = " to ".join(map(str, dict.fromkeys((*counts[:1], *counts[-1:]))))
    return f"{measures}; questions: {asked or 'none'}"


def _shown(cell: Cell | None, exact: bool) -> str:
    if cell is None:
        return "all failed"
    lines = [f"{cell.em:z.2f} ({cell.low:z.2f}-{cell.high:z.2f})"]
    if exact:  # otherwise F1 equals the measure
        lines.append(f"F1 {cell.f1:.2f}" + ("" if cell.sub is None else f", sub {cell.sub:.2f}"))
    if cell.failed:
        lines.append(f"without {cell.failed} failed")
    return "\n".join(lines)
