"""Attempts and tokens until half of the sampled attempts are right, for several rewards and seeds, on TinyWiki.

    python -m research.sample_efficiency --folder runs/efficiency --reward_model runs/rm --picture efficiency.svg

Each row trains from tiny-base for ``--steps`` steps of 16 questions with another reward. Exact match is measured on
the training attempts, sampled at temperature 1: no question is asked twice in a run, so that the policy was trained
on none of them before. A run reaches one half at the first step at which the mean over it and the step before is at
least 0.5. Runs that the folder already holds are not made again. Needs matplotlib (the extra ``paper``).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from research.attempts_to_goal import GOAL, WINDOW, Curve, median, read_curve
from research.learning_curve import GRAY
from research.paper.curves import combine

MODEL = "REWARD_MODEL"
"""Stands for the folder of the reward model."""

_HYBRID = {
    "reward_weights.found": 0.3,
    "extra_rewards.form": "format",
    "reward_weights.form": 0.2,
    "extra_rewards.cost": "calls",
    "reward_weights.cost": -0.05,
}
"""Terms beside exact match: 0.3 for each page that was found, 0.2 for the right form, and 0.05 less for each call."""

_QUALITY = {"extra_rewards.quality": MODEL}

_ALONE = {
    "reward_weights.em": 0.0,
    "algorithm.kl.coefficient": 0.05,
    "algorithm.kl.placement": "reward",
    "algorithm.kl.estimator": "k1",
}
"""No exact match, and 0.05 times the KL divergence from tiny-base off the reward: a proxy is followed only so far."""


@dataclass(frozen=True, slots=True)
class Row:
    """A reward: its settings beside the settings of the demo, and the color of its curve (Okabe and Ito)."""

    name: str
    settings: Mapping[str, Any]
    color: str


ROWS = (
    Row("outcome", {}, "#0072B2"),
    Row("hybrid", _HYBRID, "#D55E00"),
    Row("process", {"algorithm": "process-grpo", "reward_weights.found": 0.3}, "#009E73"),
    Row("reward model", {**_QUALITY, **_ALONE}, "#CC79A7"),
    Row("reward model shuffled", {**_QUALITY, **_ALONE, "shuffle_rewards": True}, "#56B4E9"),
    Row("log-probability", {"extra_rewards.sure": "logprob", **_ALONE}, "#000000"),
    Row("reward model + outcome", _QUALITY, "#E69F00"),
    Row("shuffled", {"shuffle_rewards": True}, "#7F7F7F"),
)


def is_finished(folder: Path) -> bool:
    if not (folder / "run.db").exists():
        return False
    with closing(RunReader(folder)) as reader:
        return reader.is_complete()


@dataclass(frozen=True, slots=True)
class Options:
    """What all runs have in common: their length, the attempts at each question, and the reward model."""

    steps: int
    group_size: int
    reward_model: str


def config_of(row: Row, seed: int, folder: Path, options: Options, taskset: TaskSet) -> TrainConfig:
    """Return the settings of a run: the settings of the demo with the reward of the row, and without evaluations."""
    wanted: dict[str, Any] = {
        "seed": seed,
        "run": str(folder),
        "steps": options.steps,
        "group_size": options.group_size,
        "evaluate_every": 0,
        "evaluate_n": 1,
        "checkpoint_every": 0,
        "pass_k": 0,
        **{name: options.reward_model if value == MODEL else value for name, value in row.settings.items()},
    }
    return resolve(TrainConfig, [Layer("sample efficiency", wanted), Layer("recipe of tinywiki", taskset.recipe)])


def table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Return the table in Markdown: for each row the medians, the seeds that reached the goal, and the last steps."""
    lines = [
        f"| reward | seeds that reached {GOAL} | attempts | sampled tokens | exact match, last {WINDOW} steps |",
        "|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        found = sum(run.reached() is not None for run in runs)
        attempts = median([run.attempts_to_goal() for run in runs])
        tokens = median([run.tokens_to_goal() for run in runs])
        last = median([statistics.fmean(run.em[-WINDOW:]) for run in runs])
        last_cell = f"{last.value:.2f} ({last.low:.2f}-{last.high:.2f})"
        lines.append(f"| {name} | {found} of {len(runs)} | {attempts} | {tokens} | {last_cell} |")
    return "\n".join(lines)


def draw(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """Return the figure: exact match over attempts, the mean of the seeds, and their range as a band."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for row in ROWS:
        if row.name not in curves:
            continue
        band = combine([tuple(zip(run.attempts, run.em, strict=True)) for run in curves[row.name]])
        axes.fill_between(band.steps, band.low, band.high, color=row.color, alpha=0.12, linewidth=0)
        axes.plot(band.steps, band.mean, color=row.color, linewidth=1.8, label=row.name)
    axes.axhline(GOAL, color=GRAY, linestyle=":", linewidth=1)
    axes.set_xlabel("attempts", color=GRAY)
    axes.set_ylabel("exact match, sampled", color=GRAY)
    axes.set_ylim(0, 1.03)
    axes.tick_params(colors=GRAY)
    axes.legend(frameon=False, labelcolor=GRAY, loc="upper left", fontsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRAY)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--reward_model", default="", help="a folder that train-reward made; empty: leave its rows out")
    parser.add_argument("--picture", type=Path, help="the SVG file to write")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--group_size", type=int, default=8, help="attempts at each of the 16 questions of a step")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    given = parser.parse_args()
    options = Options(given.steps, given.group_size, given.reward_model)
    rows = [row for row in ROWS if row.name in given.rows]
    if not given.reward_model:
        rows = [row for row in rows if MODEL not in row.settings.values()]
    curves: dict[str, list[Curve]] = {row.name: [] for row in rows}
    for seed, row in itertools.product(range(given.seeds), rows):
        folder = given.folder / f"{row.name.replace(' ', '-')}-{seed}"
        if not is_finished(folder):
            shutil.rmtree(folder, ignore_errors=True)
            taskset = build("tinywiki", None, None, seed)
            train(config_of(row, seed, folder, options, taskset), taskset, SilentProgress())
        curves[row.name].append(read_curve(folder))
        print(f"{row.name}, seed {seed}: exact match {curves[row.name][-1].em[-1]:.2f} in the last step", flush=True)
    print(table(curves))
    if given.picture is not None:
        with rc_context({"svg.hashsalt": "agent-r1"}):
            draw(curves).savefig(given.picture, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
