"""Line charts: convert curves to SVG coordinates for the template ``_chart.html``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.core.profile import CPU_SECONDS, SECONDS
from agent_r1.core.trajectory import Status
from agent_r1.viewer.text import number, one_line

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 24
"""The margins around the plot area of a chart, in SVG units."""

MAX_POINTS = 300
"""The largest number of points of one line."""

NUM_COLORS = 8

MAX_COVERED = 3
"""The number of dash patterns. A line is dashed if an earlier line of the chart has the same points.

A solid line would hide the earlier line.
"""

Curve = Mapping[int, float]
"""The values of one curve, by optimizer step."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. The point of the step ``marked`` gets a mark. Colors repeat after NUM_COLORS lines."""

    label: str
    curve: Curve
    color: int
    marked: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line in SVG coordinates."""

    label: str
    color: int
    path: str  # the attribute ``d`` of the SVG path
    # the number of earlier lines of the chart that contain all points of the line, at most MAX_COVERED. The line is
    # dashed if the number is not 0
    covered: int
    dots: tuple[tuple[float, float], ...]  # the points (x, y) that are drawn as dots; () if the line has no dots
    mark: tuple[float, float] | None  # the point (x, y) that gets a mark, or None
    # (x, step, y, value) of each point, for the tooltip of the chart
    values: tuple[tuple[float, int, float, float], ...]
    last: str
    summary: str  # a text with the last, smallest and largest value


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart for the HTML template. Without finite values, it has no lines, and ``missing`` says why."""

    title: str
    unit: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    note: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    # A linear or logarithmic map from [low, high] to coordinates in [start, end].

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(one, 1e-300)) for one in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def draw(panel: Panel, lines: Sequence[Line], title: str = "") -> Chart:
    """Return a chart of ``lines``. Values that are NaN or infinite are left out.

    The vertical axis of a logarithmic panel is linear if a value is negative, or if all are 0. Otherwise zeros are left
    out.
    """
    title = one_line(title or panel.title, 120)
    curves = [{step: value for step, value in sorted(line.curve.items()) if math.isfinite(value)} for line in lines]
    values = [value for curve in curves for value in curve.values()]
    log = panel.log and min(values, default=0) >= 0 and any(values)
    if log:
        curves = [{step: value for step, value in curve.items() if value > 0} for curve in curves]
        values = [value for curve in curves for value in curve.values()]
    if not values:
        return Chart(title, panel.unit, (), missing=panel.missing)
    steps = [step for curve in curves for step in curve]
    y_marks = _log_marks(min(values), max(values)) if log else _marks(min(values), max(values), panel.from_zero)
    x = _Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = _Scale(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP, log)
    drawn = tuple(
        _draw_line(line, curve, curves[:index], x, y)
        for index, (line, curve) in enumerate(zip(lines, curves, strict=True))
        if curve
    )
    x_ticks = tuple(Tick(x(step), number(step)) for step in _step_marks(min(steps), max(steps)))
    y_ticks = tuple(Tick(y(mark), f"{mark:.0e}" if log and mark < 0.01 else number(mark)) for mark in y_marks)
    return Chart(title, panel.unit, drawn, x_ticks, y_ticks, "logarithmic" if log else "")


def sparkline(curve: Curve, width: int = 96, height: int = 24) -> str:
    """Return a small curve without axes, as the attribute ``d`` of an SVG path; "" for fewer than two finite values."""
    points = [(step, value) for step, value in sorted(curve.items()) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    values = [value for _, value in points]
    x, y = _Scale(points[0][0], points[-1][0], 2, width - 2), _Scale(min(values), max(values), height - 3, 3)
    return _path([(x(step), y(value)) for step, value in _thin(points)])


def _draw_line(line: Line, curve: Curve, earlier: Sequence[Curve], x: _Scale, y: _Scale) -> DrawnLine:
    equal = [other for other in earlier if all(other.get(step) == value for step, value in curve.items())]
    covered = min(len(equal), MAX_COVERED)
    points = _thin(list(curve.items()))
    values = tuple((x(step), step, y(value), value) for step, value in points)
    places = [(place, height) for place, _, height, _ in values]
    last, low, high = points[-1][1], min(curve.values()), max(curve.values())
    marked = line.marked if line.marked in curve else None
    mark = None if marked is None else (x(marked), y(curve[marked]))
    label = one_line(line.label, 120)
    return DrawnLine(
        label=label,
        color=line.color % NUM_COLORS,
        path=_path(places),
        covered=covered,
        dots=tuple(places) if len(places) <= 40 and not covered else (),
        mark=mark,
        values=values,
        last=number(last),
        summary=f"{label}: last {number(last)}, smallest {number(low)}, largest {number(high)}",
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    # From each interval, the points with the smallest and the largest value are kept, so that no peak disappears.
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / (MAX_POINTS - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        kept |= {min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])}
    return sorted(kept)


def _marks(low: float, high: float, from_zero: bool) -> list[float]:
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # a constant curve lies in the middle
        room = abs(high) / 2
        low, high = (low - room, high + room) if room else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def _log_marks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    last = first + stride * math.ceil((last - first) / stride)
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def _step_marks(low: int, high: int) -> list[int]:
    if high == low:
        return [low]
    rough = max(1.0, (high - low) / 6)
    power = 10 ** math.floor(math.log10(rough))
    step = next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= rough)
    return list(range(math.ceil(low / step) * step, high + 1, step))


VALIDATION = "validation_"
"""The prefix of the metrics of a validation."""

BEST_BY = f"{VALIDATION}em"

Curves = Mapping[str, Curve]
"""The curves of a run, by metric."""

Named = Sequence[tuple[str, Curve]]
"""The curves of one chart, as pairs (label, curve)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The description of a chart."""

    title: str
    unit: str
    # takes all curves of a run, and returns the curves of the chart with their labels
    select: Callable[[Curves], Named]
    log: bool = False  # whether the vertical axis is logarithmic, if the values allow it
    from_zero: bool = False  # whether the vertical axis must contain 0
    missing: str = ""  # the text in place of a chart without values. "": the chart is left out
    are_parts: bool = False  # whether the curves are parts of a whole, such as the parts of a step


def best_step(curves: Curves) -> int | None:
    """Return the step with the largest exact match in validation; None without a validation."""
    validated = curves.get(BEST_BY, {})
    return max(validated, key=lambda step: (validated[step], step)) if validated else None


def _only(*names: str) -> Callable[[Curves], Named]:
    return lambda curves: [(_label(name), curves[name]) for name in names if name in curves]


def _rewards(curves: Curves) -> Named:
    named = [(name.removeprefix("reward/"), curve) for name, curve in curves.items() if name.startswith("reward/")]
    total = [("total", curves["reward"])] if "reward" in curves else []
    return [*total, *named]


def _per_attempt(*names: str) -> Callable[[Curves], Named]:
    def select(curves: Curves) -> Named:
        attempts = _sum(curves.get(status.value, {}) for status in Status)
        return [(_label(name), _share(curves[name], attempts)) for name in names if name in curves]

    return select


def _call_errors(curves: Curves) -> Named:
    calls = curves.get("calls", {})
    names = {"invalid_calls": "invalid call of the agent", "failed_calls": "failure of the tool"}
    return [(label, _share(curves[name], calls, 100)) for name, label in names.items() if name in curves]


def _endings(curves: Curves) -> Named:
    counts = {status.value: curves[status.value] for status in Status if status.value in curves}
    attempts = _sum(counts.values())
    occurring = {name: curve for name, curve in counts.items() if any(curve.values())}
    return [(_label(name), _share(curve, attempts, 100)) for name, curve in occurring.items()]


def _seconds(curves: Curves) -> Named:
    phases = {name: curve for name, curve in curves.items() if name.endswith("_seconds")}
    longest = max((max(curve.values(), default=0) for curve in phases.values()), default=0)
    return [
        (name.removesuffix("_seconds"), curve)
        for name, curve in phases.items()
        if max(curve.values(), default=0) >= longest / 100  # phases that take no time make the legend long
    ]


def _engine_tokens(curves: Curves) -> Named:
    return [(found[1], curve) for name, curve in curves.items() if (found := re.fullmatch("engine/(.*)_tokens", name))]


def _starting_with(prefix: str, keep_zero: bool = False) -> Callable[[Curves], Named]:
    return lambda curves: [
        (name.removeprefix(prefix), curve)
        for name, curve in curves.items()
        if name.startswith(prefix) and (keep_zero or any(curve.values()))
    ]


def _ending_with(suffix: str) -> Callable[[Curves], Named]:
    return lambda curves: [(_label(name), curve) for name, curve in curves.items() if name.endswith(suffix)]


def _label(name: str) -> str:
    return {"logprob_gap": "largest", "logprob_gap_mean": "mean", "tokens": "tokens", "calls": "calls"}.get(
        name, name.replace("_", " ")
    )


def _unless_zero(select: Callable[[Curves], Named]) -> Callable[[Curves], Named]:
    def select_others(curves: Curves) -> Named:
        selected = select(curves)
        return selected if any(any(curve.values()) for _, curve in selected) else []

    return select_others


def _sum(curves: Iterable[Curve]) -> Curve:
    total: dict[int, float] = {}
    for curve in curves:
        for step, value in curve.items():
            total[step] = total.get(step, 0.0) + value
    return total


def _share(curve: Curve, whole: Curve, scale: float = 1.0) -> Curve:
    return {step: scale * value / whole[step] for step, value in curve.items() if whole.get(step)}


PANELS = (
    Panel("Reward", "mean over attempts", _rewards, missing="No step yet"),
    Panel(
        "Validation",
        "mean over questions",
        lambda curves: [one for one in _starting_with(VALIDATION, keep_zero=True)(curves) if one[0] != "loss"],
        missing="No validation: --evaluate_every sets how often",
    ),
    Panel("Reward by environment", "mean over attempts", _starting_with("env_reward/", keep_zero=True)),
    Panel("Exact match by environment", "mean over attempts", _starting_with("env_em/", keep_zero=True)),
    Panel("Groups without contrast", "share by environment", _starting_with("env_constant_groups/", keep_zero=True)),
    Panel("Trained and true reward", "means over attempts, and correlation", _starting_with("proxy/", keep_zero=True)),
    Panel("Equal groups", "share of the groups", _only("dead_groups", "solved_groups"), from_zero=True),
    Panel("Entropy", "nats per token", _only("entropy"), from_zero=True),
    Panel("Length", "sampled tokens per attempt", _per_attempt("tokens"), from_zero=True),
    Panel("Tokens of continuations", "per step", _only("continuation_tokens"), from_zero=True),
    Panel("Tool calls", "per attempt", _per_attempt("calls"), from_zero=True),
    Panel("Tool errors", "% of calls", _call_errors, from_zero=True),
    Panel("Endings", "% of attempts", _endings, from_zero=True),
    Panel("Throughput", "tokens per second", _only("tokens_per_second"), from_zero=True),
    Panel("Tokens of the engine", "per step", _engine_tokens, from_zero=True),
    Panel("Engine in use", "share of the time", _only("engine/utilization"), from_zero=True),
    Panel("Time of a step", "seconds", _seconds, from_zero=True),
    Panel("Profile of a step", "seconds", _starting_with(SECONDS), from_zero=True, are_parts=True),
    Panel(
        "CPU time of a step", "CPU seconds of all threads", _starting_with(CPU_SECONDS), from_zero=True, are_parts=True
    ),
    Panel("Staleness", "steps", _unless_zero(_only("staleness")), from_zero=True),
    Panel("Log-probability gap", "|trainer - engine|", _only("logprob_gap", "logprob_gap_mean"), log=True),
    Panel("KL divergence", "nats per token", _unless_zero(_only("kl_old", "kl_reference"))),
    Panel("Gradient norm", "before clipping", _ending_with("gradient_norm"), from_zero=True),
    Panel("Loss", "per term", _ending_with("_loss")),
    Panel("Critic", "explained variance", _only("critic/explained_variance")),
)
"""The charts on the page of a run, in their order."""

_SHOWN = frozenset({*(status.value for status in Status), "tokens", "calls", "invalid_calls", "failed_calls", "reward"})


def draw_run(curves: Curves) -> tuple[Chart, ...]:
    best = best_step(curves)
    charts = []
    for panel in PANELS:
        selected = _largest(panel.select(curves)) if panel.are_parts else panel.select(curves)
        # a run on transcripts has steps and no rewards
        if selected or (panel.missing and not (panel is PANELS[0] and curves)):
            lines = [
                Line(label, curve, color, best if curve is curves.get(BEST_BY) else None)
                for color, (label, curve) in enumerate(selected)
            ]
            charts.append(draw(panel, lines))
    return tuple(charts)


def _largest(parts: Named) -> Named:
    if len(parts) <= NUM_COLORS:
        return parts
    by_size = sorted(parts, key=lambda part: sum(part[1].values()), reverse=True)
    labels = {label for label, _ in by_size[: NUM_COLORS - 1]}
    rest = _sum(curve for label, curve in parts if label not in labels)
    return [*(part for part in parts if part[0] in labels), ("rest", rest)]


def draw_other(curves: Curves) -> tuple[Chart, ...]:
    """Return a chart for each metric that :func:`draw_run` does not show. Constant metrics are left out."""
    drawn = {id(curve) for panel in PANELS for _, curve in panel.select(curves)}
    return tuple(
        draw(Panel(name, "", lambda _: ()), [Line(name, curve, 0)])
        for name, curve in curves.items()
        if id(curve) not in drawn and name not in _SHOWN and len(set(curve.values())) > 1
    )


def draw_comparison(runs: Mapping[str, Curves], of_parts: bool = False) -> tuple[Chart, ...]:
    """Return the charts that compare several runs: one metric per chart, one line per run."""
    charts = [chart for panel in PANELS if panel.are_parts == of_parts for chart in _compare(panel, runs)]
    # A part that only one run has, such as the ranks of a trainer, is nothing to compare.
    return tuple(chart for chart in charts if not of_parts or len(chart.lines) == len(runs))


def _compare(panel: Panel, runs: Mapping[str, Curves]) -> Iterator[Chart]:
    selected = {run: dict(panel.select(curves)) for run, curves in runs.items()}
    labels = dict.fromkeys(label for named in selected.values() for label in named)
    for label in labels:
        lines = [
            Line(run, named[label], color, best_step(runs[run]) if panel.title == "Validation" else None)
            for color, (run, named) in enumerate(selected.items())
            if label in named
        ]
        yield draw(panel, lines, panel.title if len(labels) == 1 else f"{panel.title}: {label}")
