"""The command ``view``."""

from __future__ import annotations

import html
import json
import os
import signal
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from pydantic_core import PydanticUndefined

from agent_r1.commands.runs import RUNS, named_folder, no_run
from agent_r1.config import iter_fields
from agent_r1.model.names import NAMED_MODELS
from agent_r1.store import is_run
from agent_r1.training.config import TrainConfig

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
    from agent_r1.viewer import Catalog, ViewerServer, create_app
    from agent_r1.viewer.app import run_path

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
    """Open ``address`` in the browser when the ``with`` block begins.

    The browser gets a private file that leads to the address, because command lines are visible to all users, and the
    address contains a token.
    """
    link = html.escape(address)
    with NamedTemporaryFile("w", prefix="agent-r1-view-", suffix=".html") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={link}"><a href="{link}">{link}</a>\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def _folder(run: str) -> Path:
    """Return the folder that the argument ``run`` names: the folder of one run, or a folder with several runs.

    Raise InvalidInput if the folder contains no run.
    """
    from agent_r1.viewer import Catalog

    folder = named_folder(run)
    if not Catalog([folder]).runs():
        raise no_run(run, folder)
    return folder


def default_settings() -> Mapping[str, Any]:
    """Return the default of each setting of a training run as a JSON value, by dotted key.

    The parameters of algorithms are left out, because reading them would import torch.
    """
    defaults = {}
    for key, field in iter_fields(TrainConfig):
        value = field.get_default(call_default_factory=True)
        if value is not PydanticUndefined and key != "algorithm":
            defaults[key] = json.loads(json.dumps(value, default=str))
    return defaults


def find_model(name: str) -> Path | None:
    """Return the folder of the model ``name``; None if the model is not on this machine. Nothing is downloaded.

    ``name`` is a short name, a folder or a name on the Hugging Face hub.
    """
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
