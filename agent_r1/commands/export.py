"""The command ``export``, which writes a run in the formats of other tools."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from agent_r1.commands.command import FilePath, SettingsCommand, json_option, show
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from agent_r1.export import ExportConfig, ExportReport, export_run
from agent_r1.store import is_run, run_folder


@click.command(cls=SettingsCommand, config=ExportConfig)
@click.argument("run")
@click.argument("out", type=FilePath())
@click.option("--force", is_flag=True, help="Replace OUT if it is an earlier export.")
@click.option("--public", is_flag=True, help="With --push: make a new repository public.")
@json_option
def export(run: str, out: Path, settings: Layer, force: bool, public: bool, as_json: bool) -> None:
    """Write a run in the formats of other tools.

    RUN is a name in runs/, or a folder. Its model, adapter, trajectories or metrics are written to the new folder OUT.
    If the command fails, there is no folder OUT.
    """
    config = resolve(ExportConfig, [settings])
    if public and not config.push:
        raise InvalidInput("--public", got="no repository", do="give --push OWNER/NAME, or leave it out")
    report = export_run(find_run(run), out, config, force=force, public=public)
    show(as_json, {**asdict(report), "out": str(out)}, _render(report))


def find_run(run: str) -> Path:
    """Return the folder of a run. Raise InvalidInput if there is none, with the most similar name in runs/."""
    folder = run_folder(run)
    if not is_run(folder):
        there = sorted(file.parent.name for file in Path("runs").glob("*/run.db"))
        do = f"{suggest(run, there)} give the name of a run in runs/, or the folder of one".strip()
        got = (
            f"{run}, but {folder} holds no run" if os.path.isdir(folder) else f"{run}, but there is no folder {folder}"
        )
        raise InvalidInput("run", got=got, do=do)
    return folder


def _render(report: ExportReport) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items())
    lines = [f"{report.format} in {report.out} ({facts}; {report.bytes / 1e6:.1f} MB); README.md says how to load it"]
    return "\n".join([*lines, *([f"uploaded: {report.pushed}"] if report.pushed else [])])
