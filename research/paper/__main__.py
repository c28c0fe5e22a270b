"""Run the paper's comparison in miniature: ``python -m research.paper --help``."""

from __future__ import annotations

import sys

import click

from agent_r1.cli import run_command
from agent_r1.commands.command import SettingsCommand, json_option, progress_of, quiet_option, show
from agent_r1.config import Layer, resolve
from research.paper.experiments import PaperConfig, select_experiments


@click.command(cls=SettingsCommand, config=PaperConfig)
@json_option
@quiet_option
def paper(settings: Layer, as_json: bool, quiet: bool) -> None:
    """Compare the methods of the paper in miniature, on the task set tinywiki."""
    config = resolve(PaperConfig, [settings])
    select_experiments(config)  # report invalid settings before torch is imported
    from research.paper.report import compare, comparison_json, render_comparison

    comparison = compare(config, progress_of(quiet))
    show(as_json, comparison_json(comparison), render_comparison(comparison))
    comparison.raise_failures()


if __name__ == "__main__":
    sys.exit(run_command(paper, sys.argv[1:], "python -m research.paper"))
