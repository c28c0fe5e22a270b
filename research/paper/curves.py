"""Draw the learning curves: one panel per method, all with the same axes. Needs matplotlib (the extra ``paper``)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from research.attempts_to_goal import GOAL
from research.paper.experiments import Result
from research.paper.methods import Method

COLUMNS = 3

REWARD, VALIDATION, FULL = "#0072B2", "#D55E00", "#7F7F7F"
"""Colors that color-blind readers can distinguish (Okabe and Ito)."""

BASES = (REWARD, VALIDATION, "#009E73", "#CC79A7", "#E69F00")
"""The colors of the bases; further bases begin again."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: the mean, lowest and highest value at each step. NaN values are left out.

    Example:
        Band(steps=(1, 2), mean=(0.3, 0.5), low=(0.2, 0.4), high=(0.4, 0.6))
    """

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def combine(curves: Sequence[Points]) -> Band:
    """Combine the curves of several seeds."""
    values: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        if not math.isnan(value):
            values.setdefault(step, []).append(value)
    steps = sorted(values)
    return Band(
        tuple(steps),
        tuple(sum(values[step]) / len(values[step]) for step in steps),
        tuple(min(values[step]) for step in steps),
        tuple(max(values[step]) for step in steps),
    )


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves of a method by the seed of the base. ``full`` is the curve of the method that it ablates, if any."""

    title: str
    bases: Mapping[int, Band]
    full: Band | None


def make_panels(methods: Sequence[Method], results: Sequence[Result]) -> list[Panel]:
    """Return a panel for each method that was trained."""
    curves: dict[str, dict[int, list[Points]]] = {}
    for result in results:
        if result.training is not None:
            curve = result.training.curve
            points = tuple(zip(curve.attempts, curve.em, strict=True))
            curves.setdefault(result.method, {}).setdefault(result.base, []).append(points)
    full = {name: combine([one for seeds in of.values() for one in seeds]) for name, of in curves.items()}
    return [
        Panel(
            method.title,
            {base: combine(seeds) for base, seeds in sorted(curves[method.name].items())},
            full.get(method.ablates or ""),
        )
        for method in methods
        if method.name in curves
    ]


def draw(methods: Sequence[Method], results: Sequence[Result]) -> bytes:
    """Return the picture as SVG. Equal results give equal bytes."""
    panels = make_panels(methods, results)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    # With a fixed salt the ids inside the file, and so its bytes, are the same each time.
    with rc_context({"svg.hashsalt": "agent-r1", "font.size": 9}):
        figure = Figure(figsize=(9.0, 0.8 + 1.9 * rows), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                _draw_panel(axes, panels[index])
                # A panel with no panel below it shows the numbers of attempts.
                axes.tick_params(labelbottom=index + COLUMNS >= len(panels))
            else:
                axes.set_visible(False)
        _add_legend(figure, sorted({base for panel in panels for base in panel.bases}))
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylim(-0.03, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.axhline(GOAL, color=FULL, linestyle=":", linewidth=1)
    if panel.full is not None:
        axes.plot(panel.full.steps, panel.full.mean, color=FULL, linestyle="--", linewidth=1.2, zorder=3)
    for base, band in panel.bases.items():
        axes.fill_between(band.steps, band.low, band.high, color=_color(base), alpha=0.15, linewidth=0)
        axes.plot(band.steps, band.mean, color=_color(base), linewidth=1.4)


def _color(base: int) -> str:
    return BASES[base % len(BASES)]


def _add_legend(figure: Figure, bases: Sequence[int]) -> None:
    """Add one legend for all panels."""
    lines = [Line2D([], [], color=_color(base), label=f"base {base}") for base in bases]
    lines.append(Line2D([], [], color=FULL, linestyle="--", label="with all masks, mean of all bases"))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
