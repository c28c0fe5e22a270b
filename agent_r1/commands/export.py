"""The command ``export``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.filesize import decimal
from rich.text import Text

from agent_r1.commands.command import FilePath, SettingsCommand, json_option, show
from agent_r1.commands.runs import find_run
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.export import ExportConfig, ExportReport, export_run


@click.command(cls=SettingsCommand, config=ExportConfig)
@click.argument("run")
@click.argument("out", type=FilePath())
@click.option("--force", is_flag=True, help="Replace OUT if it is an earlier export.")
@click.option("--public", is_flag=True, help="With --push: make a new repository public.")
@json_option
def export(run: str, out: Path, settings: Layer, force: bool, public: bool, as_json: bool) -> None:
    """Write a run in the formats of other tools.

    RUN is a name in runs/, or a folder. The model, adapter, trajectories or metrics of the run are written to the
    folder OUT, which must not exist yet (see --force). If writing fails, OUT is not created, and an existing OUT is
    not changed.
    """
    config = resolve(ExportConfig, [settings])
    if public and not config.push:
        raise InvalidInput("--public", got="no repository", do="give --push OWNER/NAME, or leave it out")
    report = export_run(find_run(run), out, config, force=force, public=public)
    show(as_json, {**asdict(report), "out": str(out)}, _render(report))


def _render(report: ExportReport) -> Text:
    size = decimal(report.bytes)
    line = f"{report.format} in {report.out}: {_contents(report)}, {size}; README.md says how to load it"
    return Text("\n".join([line, *([f"uploaded: {report.pushed}"] if report.pushed else [])]))


def _contents(report: ExportReport) -> str:
    facts = dict(report.facts)
    if report.format in ("model", "adapter"):
        return f"step {facts['step']}" + (", the best by validation" if facts["best"] else "")
    name, count = next(iter(facts.items()))
    filters = "".join(f", {key} {value}" for key, value in facts.items() if key != name)
    return f"{count:,} {name if count != 1 else name.removesuffix('s')}{filters}"
