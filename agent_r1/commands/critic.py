"""The command ``train-critic``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from agent_r1.commands.command import (
    SettingsCommand,
    columns,
    config_option,
    json_option,
    progress_of,
    quiet_option,
    show,
    with_file,
)
from agent_r1.commands.runs import find_run
from agent_r1.config import Layer, resolve
from agent_r1.training.critic_config import CriticConfig


@click.command("train-critic", cls=SettingsCommand, config=CriticConfig)
@config_option
@json_option
@quiet_option
def train_critic(settings: Layer, config_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Train a critic on the recorded attempts of a run, for value-guided decoding.

    Some tasks are held out. On the attempts at these tasks, the errors of the critic are compared with the errors of a
    constant prediction, the mean return.
    """
    config = resolve(CriticConfig, with_file(settings, config_file))
    run = find_run(config.run)
    from agent_r1.training.train_critic import train_critic

    report = train_critic(run, config, progress_of(quiet))
    rows = {
        "critic": report.folder,
        "trained on": f"{report.attempts} attempts at {report.tasks} tasks",
        "held out": f"{report.held_out_attempts} attempts at {report.held_out_tasks} tasks",
    }
    for name, fit in (("all states", report.all_states), ("after actions", report.after_actions)):
        error = f"squared error {fit.error:.4f} (mean return: {fit.mean_error:.4f})"
        rows[name] = f"explained variance {fit.explained_variance:z.2f}, {error}, {fit.states} states"
    show(as_json, asdict(report), columns(rows))
