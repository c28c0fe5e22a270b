"""Measure how the cost of a training step grows, along one axis at a time, and draw it.

    python benchmarks/growth.py                                     # every axis: about ten minutes on one core
    python benchmarks/growth.py turns context --save growth.json    # some axes; the figures also in a file
    python benchmarks/growth.py --load growth.json --picture docs/images/growth.svg

Random Llama models take two steps of GRPO as in benchmarks/peers.py, with run database and health monitor, one torch
thread and the profiler; the second step counts. The table has the CPU seconds of a step by phase: rollout (decode,
prefill, sampling), framework (rendering, tools, rewards, packing, recording, ..) and update (forward, backward,
optimizer). The exponent of two rows is log(ratio of the seconds) / log(ratio of the axis): 1 if the cost is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from peers import SHAPES, Dialogue, Shape, random_reward, write_model
from rich.console import Console
from rich.table import Table

import agent_r1
from agent_r1.core.messages import Message
from agent_r1.core.profile import CPU_SECONDS, PARTS, mean_profile
from agent_r1.core.task import Task
from agent_r1.store.reader import RunReader
from agent_r1.training.progress import SilentProgress

STEPS = 2
PHASES: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"generation", "prefill", "sampling"}),
    "update": frozenset({"forward", "backward", "optimizer", "publish"}),
}
FRAMEWORK = "framework"
"""The phase of all other parts of a step."""


SMALL = SHAPES["0.5M"]


@dataclass(frozen=True)
class Work:
    """The work of a step: the model, and the tokens of an attempt."""

    shape: Shape = SMALL
    groups: int = 2
    group_size: int = 8
    turns: int = 2
    prompt: int = 128
    action: int = 16
    observation: int = 32


AXES: Mapping[str, Sequence[tuple[float, Work]]] = {
    "parameters in millions": [
        (0.48, Work()),
        (1.6, Work(Shape(128, 384, 5, 4, 4))),
        (6.2, Work(Shape(256, 768, 6, 4, 4))),
        (14.6, Work(SHAPES["14M"])),
    ],
    "turns": [(n, Work(groups=1, group_size=4, turns=n, action=8, observation=16)) for n in (2, 10, 30, 100)],
    "context": [(n, Work(groups=1, group_size=4, prompt=n - 64)) for n in (256, 1024, 4096, 8192)],
    "vocabulary": [(n, Work(replace(SMALL, vocabulary=n), groups=1)) for n in (512, 4096, 32768, 152064)],
    "group size": [(n, Work(groups=1, group_size=n)) for n in (4, 16, 64)],
    "attempts": [(8 * n, Work(groups=n)) for n in (1, 4, 16)],
}
"""The points of each axis: the number on the axis, and the work."""


@dataclass(frozen=True)
class Point:
    """The cost of a step at a point of an axis.

    Attributes:
        at: the number on the axis.
        seconds: the CPU seconds of the step by phase.
        tokens: the tokens of the conversations of the step.
    """

    at: float
    seconds: Mapping[str, float]
    tokens: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measure(at: float, work: Work) -> Point:
    """Train for two steps, and return the cost of the second."""
    letters = random.Random(0)

    def text(length: int) -> str:
        return "".join(letters.choices(string.ascii_lowercase, k=length))

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder / "model", work.shape)
        tasks = [Task(str(number), (Message.user(text(work.prompt)),)) for number in range(work.groups * STEPS)]
        agent_r1.train(
            Dialogue(text(work.observation), work.turns), tasks, model=str(folder / "model"), algorithm="grpo",
            rewards=[random_reward], progress=SilentProgress(), run=str(folder / "run"), steps=STEPS,
            groups_per_step=work.groups, group_size=work.group_size, max_tokens=work.action,
            context=64 + work.prompt + work.turns * (work.action + work.observation + 32),
            threads=1, trainer={"learning_rate": 1e-6}, evaluate_n=1, checkpoint_every=0, profile=STEPS,
        )  # fmt: skip
        with closing(RunReader(folder / "run")) as reader:
            profile = mean_profile({name: reader.curve(name) for name in reader.metric_names()}, first_step=STEPS)
            turns = [turn for trajectory in reader.trajectories() for turn in trajectory.turns]
    seconds = {phase: sum(profile[CPU_SECONDS + part] for part in parts) for phase, parts in PHASES.items()}
    seconds[FRAMEWORK] = sum(profile[CPU_SECONDS + part] for part in PARTS) - sum(seconds.values())
    return Point(at, seconds, sum(len(turn.new_ids) + len(turn.action_ids) for turn in turns) // STEPS)


def exponent(one: Point, other: Point, phase: str) -> float:
    """Return the exponent with which the seconds of a phase grow from one point of an axis to another."""
    ratio = other.seconds[phase] / one.seconds[phase]
    return math.log(ratio) / math.log(other.at / one.at)


def table_of(axis: str, points: Sequence[Point]) -> Table:
    phases = [*PHASES, FRAMEWORK]
    table = Table(axis, "tokens", *phases, "step", *(f"exponent, {phase}" for phase in phases))
    for number, point in enumerate(points):
        before = points[number - 1] if number else None
        grown = [f"{exponent(before, point, phase):.2f}" if before else "" for phase in phases]
        seconds = [f"{point.seconds[phase]:.3f}" for phase in phases]
        table.add_row(f"{point.at:g}", f"{point.tokens:,}", *seconds, f"{point.total:.3f}", *grown)
    return table


def draw(axes: Mapping[str, Sequence[Point]], file: Path) -> None:
    """Draw the seconds of each phase along each axis, on logarithmic scales, beside a line of linear growth."""
    import matplotlib.pyplot as plt

    columns = 3
    rows = -(-len(axes) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False)
    for panel, (axis, points) in zip(panels.flat, axes.items(), strict=False):
        at = [point.at for point in points]
        for phase in (*PHASES, FRAMEWORK):
            panel.loglog(at, [point.seconds[phase] for point in points], marker="o", label=phase)
        linear = [points[-1].total * x / at[-1] for x in at]
        panel.loglog(at, linear, linestyle=":", color="gray", label="linear")
        panel.set_xticks(at, [f"{x:g}" for x in at])
        panel.set_xticks([], minor=True)
        panel.set_xlabel(axis)
        panel.set_ylabel("CPU seconds of a step")
    for panel in list(panels.flat)[len(axes) :]:
        panel.axis("off")
    panels.flat[0].legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name.split()[0]: name for name in AXES}
    parser.add_argument("axes", nargs="*", metavar="AXIS", choices=[*names, []], help=f"of {', '.join(names)}")
    parser.add_argument("--save", type=Path, help="write the figures to this file, beside those it has")
    parser.add_argument("--load", type=Path, help="read the figures from this file instead of measuring")
    parser.add_argument("--picture", type=Path, help="draw the figures into this file (extra agent-r1[paper])")
    options = parser.parse_args()
    found: dict[str, list[Point]] = {}
    file = options.load or options.save
    if file is not None and file.exists():
        found = {
            axis: [Point(**point) for point in points] for axis, points in json.loads(file.read_text("utf-8")).items()
        }
    console = Console(width=140)
    if options.load is None:
        torch.set_num_threads(1)
        measure(0, replace(Work(), groups=1))  # compiles the native decode step, and loads everything
        for axis in [names[name] for name in options.axes] or AXES:
            found[axis] = []
            for at, work in AXES[axis]:
                found[axis].append(measure(at, work))
                print(axis, found[axis][-1], file=sys.stderr, flush=True)
            console.print(table_of(axis, found[axis]))
            if options.save is not None:
                options.save.write_text(
                    json.dumps({name: [asdict(point) for point in points] for name, points in found.items()}, indent=1),
                    "utf-8",
                )
    else:
        for axis, points in found.items():
            console.print(table_of(axis, points))
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
