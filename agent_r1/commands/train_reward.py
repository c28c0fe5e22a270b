"""The command ``train-reward``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_r1.commands.command import (
    SettingsCommand,
    config_option,
    json_option,
    progress_of,
    quiet_option,
    show,
    with_file,
)
from agent_r1.commands.runs import find_run
from agent_r1.config import Layer, resolve
from agent_r1.reward_models.config import RewardModelConfig

if TYPE_CHECKING:
    from agent_r1.reward_models.evaluation import Evaluation, Separation
    from agent_r1.reward_models.train import RewardModelReport


@click.command("train-reward", cls=SettingsCommand, config=RewardModelConfig)
@click.argument("runs", nargs=-1, required=True)
@config_option
@json_option
@quiet_option
def train_reward(runs: tuple[str, ...], settings: Layer, config_file: Any, as_json: bool, quiet: bool) -> None:
    """Train a reward model on the attempts of RUNS, and evaluate it on tasks that it was not trained on.

    The reward model reads whole attempts, and predicts a recorded reward. A run uses the reward model with
    --extra_rewards.NAME FOLDER.
    """
    config = resolve(RewardModelConfig, with_file(settings, config_file))
    folders = [find_run(run) for run in runs]
    from agent_r1.reward_models.train import train_reward_model

    report = train_reward_model(folders, config, progress_of(quiet).print_line)
    show(as_json, _to_json(report), _render(report))


def _to_json(report: RewardModelReport) -> dict[str, Any]:
    from agent_r1.reward_models.evaluation import without_nan

    found: dict[str, Any] = without_nan({**asdict(report), "out": str(report.out)})
    return found


def _render(report: RewardModelReport) -> RenderableType:
    found = report.evaluation
    first = (
        f"{report.out}: trained on {report.training_traces:,} attempts at {report.training_tasks:,} tasks; held out: "
        f"{found.traces:,} attempts at {found.tasks:,} other tasks, {found.successes:.0%} successes"
    )
    if found.calibration_error is None:
        return Group(Text(first), _separations(found))
    last = f"expected calibration error {found.calibration_error:.3f}"
    return Group(Text(first), _separations(found), Text(last), _calibration(found))


def _separations(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("score", "AUC (95 % interval)", "AUC within tasks", "accuracy"):
        table.add_column(name, justify="left" if name == "score" else "right", no_wrap=True)
    table.add_row("reward model", *_cells(found.model), "-" if found.accuracy is None else f"{found.accuracy:.3f}")
    for name, separation in found.baselines.items():
        table.add_row(name, *_cells(separation), "")
    table.add_row("majority", "0.500", "0.500", f"{found.majority:.3f}")
    return table


def _cells(one: Separation) -> tuple[str, str]:
    within = "-" if math.isnan(one.within_tasks) else f"{one.within_tasks:.3f}"
    return f"{one.auc:.3f} ({one.low:.3f}-{one.high:.3f})", within


def _calibration(found: Evaluation) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prediction", "successes", "attempts"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.bins:
        table.add_row(f"{one.prediction:.3f}", f"{one.successes:.3f}", f"{one.count:,}")
    return table
