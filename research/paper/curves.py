"""Draw the learning curves: one panel per method, all with the same axes. Needs matplotlib (the extra ``paper``)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from research.paper.experiments import Result
from research.paper.methods import Method

COLUMNS = 3

REWARD, VALIDATION, FULL = "#0072B2", "#D55E00", "#7F7F7F"
"""Colors that color-blind readers can distinguish (Okabe and Ito)."""

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
    """The curves of a method. ``full`` is the validation curve of the method that it ablates, if any."""

    title: str
    reward: Band
    validation: Band
    full: Band | None


def make_panels(methods: Sequence[Method], results: Sequence[Result]) -> list[Panel]:
    """Return a panel for each method that was trained."""
    curves = {method.name: [r.curve for r in results if r.method == method.name and r.curve] for method in methods}
    rewards = {name: combine([curve.reward for curve in of_method]) for name, of_method in curves.items()}
    validations = {name: combine([curve.validation for curve in of_method]) for name, of_method in curves.items()}
    return [
        Panel(method.title, rewards[method.name], validations[method.name], validations.get(method.ablates or ""))
        for method in methods
        if curves[method.name]
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
                # A panel with no panel below it shows the step numbers.
                axes.tick_params(labelbottom=index + COLUMNS >= len(panels))
            else:
                axes.set_visible(False)
        _add_legend(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    if panel.full is not None:
        axes.plot(panel.full.steps, panel.full.mean, color=FULL, linestyle="--", linewidth=1.2, zorder=3)
    for curve, color, marker in ((panel.reward, REWARD, ""), (panel.validation, VALIDATION, "o")):
        axes.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(curve.steps, curve.mean, color=color, marker=marker, markersize=3, linewidth=1.4)


def _add_legend(figure: Figure) -> None:
    """Add one legend for all panels."""
    lines = [
        Line2D([], [], color=REWARD, label="reward in training"),
        Line2D([], [], color=VALIDATION, marker="o", markersize=3, label="exact match on validation"),
        Line2D([], [], color=FULL, linestyle="--", label="validation with all masks"),
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.supxlabel("optimizer step", fontsize=9)
