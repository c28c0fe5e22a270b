"""Draw how exact match on people rises over the stages of a recipe, for 1-hop and 2-hop questions apart.

    python -m research.people_curve runs/people-1 runs/people-2 runs/people-3 docs/images/people_curve.svg

Needs matplotlib (the extra ``paper``).
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from research.learning_curve import GRAY, label_axes
from research.paper.curves import REWARD, VALIDATION

WINDOW = 5
"""A point of a curve is the mean of the attempts of so many steps. A step has few questions of a kind."""

COLORS = {1: VALIDATION, 2: REWARD}
"""The colors of the curves of 1-hop and 2-hop questions."""


def exact_matches(run: Path) -> list[Mapping[int, list[float]]]:
    """Return the exact match of the attempts of each step, by the number of hops of their questions."""
    with closing(RunReader(run)) as reader:
        config, trajectories = reader.config(), list(reader.trajectories())
        steps = max(metric.step for metric in reader.metrics())
    taskset = build("people", Path(config["data"]), None, config["seed"])
    hops = {task.id: len(task.data["chain"].relations) for task in taskset.tasks("train")}
    by_step: list[dict[int, list[float]]] = [defaultdict(list) for _ in range(steps)]
    for trajectory in trajectories:
        step = trajectory.attempt.group_id // config["groups_per_step"]
        if trajectory.task_id in hops and step < steps:
            em = trajectory.rewards.get("em")
            by_step[step][hops[trajectory.task_id]].append(em if isinstance(em, float) else 0.0)
    return list(by_step)


def draw(stages: Sequence[Sequence[Mapping[int, list[float]]]]) -> Figure:
    """Return the figure. A stage is a list of steps, as :func:`exact_matches` returns it."""
    steps = [step for stage in stages for step in stage]
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for hops, color in COLORS.items():
        means = {}
        for last in range(WINDOW, len(steps) + 1):
            values = [em for step in steps[last - WINDOW : last] for em in step.get(hops, ())]
            if values:
                means[last] = statistics.fmean(values)
        axes.plot(list(means), list(means.values()), color=color, linewidth=1.8)
        end = max(means)
        axes.annotate(f"{hops}-hop", (end, means[end]), (6, 0), textcoords="offset points", color=color, va="center")
    start = 0
    for number, stage in enumerate(stages, start=1):
        axes.axvline(start, color=GRAY, alpha=0.5, linestyle=":")
        axes.annotate(f"stage {number}", (start, 0.97), (4, 0), textcoords="offset points", color=GRAY, va="top")
        start += len(stage)
    axes.set_ylim(0, 1)
    axes.set_xlim(0, 1.1 * len(steps))
    label_axes(axes)
    return figure


def main(runs: Sequence[Path], picture: Path) -> None:
    """Draw the curves of the runs, which are stages in this order, and write them to the SVG file ``picture``."""
    figure = draw([exact_matches(run) for run in runs])
    with rc_context({"svg.hashsalt": "agent-r1"}):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:-1]], Path(sys.argv[-1]))
