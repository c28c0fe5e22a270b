"""The commands ``verify``, ``export`` and ``view``, which read a run."""

from __future__ import annotations

import html
import json
import os
import signal
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import click
from pydantic_core import PydanticUndefined
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from agent_r1.commands.command import (
    RUNS,
    FilePath,
    SettingsCommand,
    columns,
    find_run,
    json_option,
    named_folder,
    no_run,
    show,
)
from agent_r1.config import Layer, iter_fields, resolve
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.export.config import ExportConfig
from agent_r1.store.folder import is_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import VerificationReport, run_digest, verify as verify_run
from agent_r1.training.config import TrainConfig

if TYPE_CHECKING:
    from agent_r1.export.run import ExportReport


@click.command()
@click.argument("run")
@click.option("--digest", is_flag=True, help="Print only a digest that is the same for equal runs.")
@json_option
def verify(run: str, digest: bool, as_json: bool) -> None:
    """Verify that no record of a run is missing, changed or contradictory. RUN is a name in runs/, or a folder."""
    folder, value = find_run(run), None
    report = verify_run(folder)
    if report.is_valid and digest:
        with closing(RunReader(folder)) as reader:
            value = run_digest(reader)
    data = {"run": str(folder), "valid": report.is_valid, **asdict(report), "digest": value}
    show(as_json, data, value or _render(report))
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if not report.is_valid:
        raise AgentR1Error(f"{folder} is not valid: {len(report.violations)} rules are violated")


def _render(report: VerificationReport) -> RenderableType:
    if not report.is_valid:
        return Text("\n".join(report.violations))
    counts = {**report.attempts, "steps": report.steps, "segments": report.segments, "checkpoints": report.checkpoints}
    counts |= {"rows": report.rows, "rows not yet closed": report.not_closed}
    facts = {name: str(count) for name, count in counts.items()}
    return Group("The run is valid.", columns(facts), "sha256 of the rows:", report.rows_sha256)


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
    from agent_r1.export.run import export_run  # imported here, because the import takes long

    report = export_run(find_run(run), out, config, force=force, public=public)
    show(as_json, {**asdict(report), "out": str(out)}, _render_export(report))


def _render_export(report: ExportReport) -> Text:
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


DEFAULT_PORT = 8765


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]..")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free port."
)
@click.option("--open/--no-open", "opens", default=False, help="Open the page in the browser. [default: --no-open]")
def view(runs: Sequence[str], port: int, opens: bool) -> None:
    """Show runs in a browser, also while they train. RUN is a name in runs/, a folder of a run, or a folder of runs.

    Without RUN, all runs in runs/ are shown. If RUN is a single run, the printed address is the page of this run,
    otherwise the list of runs. The printed address contains a token. The pages are served on this machine only, and
    only to browsers that have opened an address with this token.
    """
    from agent_r1.viewer.app import create_app, run_path
    from agent_r1.viewer.catalog import Catalog
    from agent_r1.viewer.server import ViewerServer

    folders = [_folder(run) for run in runs] or [RUNS]
    catalog = Catalog(folders)
    server = ViewerServer(create_app(catalog, default_settings(), find_model), port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: server.stop())
    names = list(catalog.runs())
    address = server.address(run_path(names[0])) if len(folders) == 1 and is_run(folders[0]) else server.url
    print(f"{len(names)} run{'' if len(names) == 1 else 's'} at {address}")
    print("Stop with Ctrl-C. From another machine: ssh -L", f"{server.port}:127.0.0.1:{server.port} HOST", flush=True)
    with _opened_in_browser(address) if opens else nullcontext():
        server.run()


@contextmanager
def _opened_in_browser(address: str) -> Iterator[None]:
    # The browser gets a private file: command lines are visible to all users, and the address contains a token.
    link = html.escape(address)
    with NamedTemporaryFile("w", encoding="utf-8", prefix="agent-r1-view-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={link}"><a href="{link}">{link}</a>\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def _folder(run: str) -> Path:
    """Return the folder that the argument ``run`` names: the folder of one run, or a folder with several runs."""
    from agent_r1.viewer.catalog import Catalog

    folder = named_folder(run)
    if not Catalog([folder]).runs():
        raise no_run(run, folder)
    return folder


def default_settings() -> Mapping[str, Any]:
    """Return the defaults of a training run by dotted key, without algorithms, which would import torch."""
    defaults = {}
    for key, field in iter_fields(TrainConfig):
        value = field.get_default(call_default_factory=True)
        if value is not PydanticUndefined and key != "algorithm":
            defaults[key] = json.loads(json.dumps(value, default=str))
    return defaults


def find_model(name: str) -> Path | None:
    """Return the folder of a model if it is on this machine. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from agent_r1.model.folders import NAMED_MODELS

    source = NAMED_MODELS.get(name)
    if isinstance(source, Path):
        return source
    if os.path.isdir(name):
        return Path(name)
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
