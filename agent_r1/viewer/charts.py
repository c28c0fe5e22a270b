"""Line charts: convert curves to SVG coordinates for the template ``_chart.html``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """A line of a chart.

    Attributes:
        color: the index of the color. Colors repeat after NUM_COLORS lines.
        marked: the step whose point gets a mark, or None.
    """

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
    """A line in SVG coordinates.

    Attributes:
        path: the attribute ``d`` of the SVG path.
        covered: the number of earlier lines of the chart that contain all points of the line, at most MAX_COVERED. The
            line is dashed if the number is not 0.
        dots: the points (x, y) that are drawn as dots; () if the line has no dots.
        mark: the point (x, y) that gets a mark, or None.
        values: (x, step, y, value) of each point, for the tooltip of the chart.
        summary: a text with the last, smallest and largest value.
    """

    label: str
    color: int
    path: str
    covered: int
    dots: tuple[tuple[float, float], ...]
    mark: tuple[float, float] | None
    values: tuple[tuple[float, int, float, float], ...]
    last: str
    summary: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart for the HTML template. Without finite values, it has no lines.

    ``missing`` is the text in place of a chart without lines; "" for the usual text.
    """

    title: str
    unit: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    note: str = ""
    missing: str = ""

    @property
    def empty(self) -> bool:
        return not self.lines


@dataclass(frozen=True, slots=True)
class _Scale:
    """A linear or logarithmic map from [low, high] to coordinates in [start, end]."""

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


def draw(title: str, unit: str, lines: Sequence[Line], *, log: bool = False, from_zero: bool = False) -> Chart:
    """Return a chart of ``lines``. Values that are NaN or infinite are left out.

    Args:
        log: make the vertical axis logarithmic, and leave out zeros. No effect if a value is negative, or all are 0.
        from_zero: make the vertical axis contain 0.
    """
    title = one_line(title, 120)
    curves = [{step: value for step, value in sorted(line.curve.items()) if math.isfinite(value)} for line in lines]
    values = [value for curve in curves for value in curve.values()]
    if log:
        log = min(values, default=0) >= 0 and any(values)
    if log:
        curves = [{step: value for step, value in curve.items() if value > 0} for curve in curves]
        values = [value for curve in curves for value in curve.values()]
    if not values:
        return Chart(title, unit, ())
    steps = [step for curve in curves for step in curve]
    y_marks = _log_marks(min(values), max(values)) if log else _marks(min(values), max(values), from_zero)
    x = _Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = _Scale(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP, log)
    drawn = tuple(
        _draw_line(line, curve, _count_covered(curve, curves[:index]), x, y)
        for index, (line, curve) in enumerate(zip(lines, curves, strict=True))
        if curve
    )
    x_ticks = tuple(Tick(x(step), number(step)) for step in _step_marks(min(steps), max(steps)))
    y_ticks = tuple(Tick(y(mark), f"{mark:.0e}" if log and mark < 0.01 else number(mark)) for mark in y_marks)
    return Chart(title, unit, drawn, x_ticks, y_ticks, "logarithmic" if log else "")


def sparkline(curve: Curve, width: int = 96, height: int = 24) -> str:
    """Return a small curve without axes, as the attribute ``d`` of an SVG path; "" for fewer than two finite values."""
    points = [(step, value) for step, value in sorted(curve.items()) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    values = [value for _, value in points]
    x, y = _Scale(points[0][0], points[-1][0], 2, width - 2), _Scale(min(values), max(values), height - 3, 3)
    return _path([(x(step), y(value)) for step, value in _thin(points)])


def _count_covered(curve: Curve, earlier: Sequence[Curve]) -> int:
    """Return how many earlier curves equal ``curve`` at all steps of ``curve``, at most MAX_COVERED."""
    equal = [other for other in earlier if all(other.get(step) == value for step, value in curve.items())]
    return min(len(equal), MAX_COVERED)


def _draw_line(line: Line, curve: Curve, covered: int, x: _Scale, y: _Scale) -> DrawnLine:
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
    """Return at most MAX_POINTS of the points (step, value).

    The points are divided into intervals of successive steps. From each interval, the points with the smallest and the
    largest value are kept, so that no peak disappears.
    """
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / (MAX_POINTS - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        kept |= {min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])}
    return sorted(kept)


def _marks(low: float, high: float, from_zero: bool) -> list[float]:
    """Return 4 to 7 round numbers with equal distances that cover the range from ``low`` to ``high``.

    If ``from_zero`` is True, the range is extended to include 0.

    Example:
        [0.0, 0.2, 0.4, 0.6, 0.8] for low = 0.1, high = 0.75 and from_zero = True
    """
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
    """Return at most 7 powers of ten that cover the range from ``low`` to ``high``.

    Example:
        [0.01, 0.1, 1.0] for low = 0.02 and high = 0.5
    """
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    last = first + stride * math.ceil((last - first) / stride)
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def _step_marks(low: int, high: int) -> list[int]:
    """Return round numbers of steps in [low, high], with equal distances.

    Example:
        [0, 5, 10, 15, 20] for low = 0 and high = 20
    """
    if high == low:
        return [low]
    rough = max(1.0, (high - low) / 6)
    power = 10 ** math.floor(math.log10(rough))
    step = next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= rough)
    return list(range(math.ceil(low / step) * step, high + 1, step))
