"""Draw the learning curve of one run: the mean reward of the training attempts, and validation.

    python -m research.learning_curve runs/NAME docs/images/learning_curve.svg

Needs matplotlib (the extra ``paper``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agent_r1.store.reader import RunReader
from research.paper.curves import REWARD, VALIDATION

GRAY = "#7F7F7F"
"""A color that is readable on a light and on a dark page."""


def label_axes(axes: Axes) -> None:
    """Label the axes of a curve of exact match over steps, and draw them in gray, without a frame."""
    axes.set_xlabel("optimizer step", color=GRAY)
    axes.set_ylabel("exact match", color=GRAY)
    axes.grid(axis="y", color=GRAY, alpha=0.3)
    axes.tick_params(colors=GRAY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRAY)


def draw(reward: Mapping[int, float], validation: Mapping[int, float]) -> Figure:
    """Return the figure. Both curves map the number of the optimizer step to a value from 0 to 1."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    curves = ((reward, "training attempts, sampled", REWARD, "o"), (validation, "validation, greedy", VALIDATION, "s"))
    for curve, label, color, marker in curves:
        axes.plot(list(curve), list(curve.values()), color=color, marker=marker, markersize=4, linewidth=1.8)
        last = max(curve)
        axes.annotate(label, (last, curve[last]), (6, 0), textcoords="offset points", color=color, va="center")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(right=1.32 * max(reward))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= max(reward)])
    label_axes(axes)
    return figure


def main(run: Path, picture: Path) -> None:
    """Draw the curve of the run in the folder ``run``, and write it to the SVG file ``picture``."""
    with closing(RunReader(run)) as reader:
        figure = draw(reader.curve("em"), reader.curve("validation_em"))
    with rc_context({"svg.hashsalt": "agent-r1"}):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
