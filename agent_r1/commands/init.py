"""The command ``init``."""

from __future__ import annotations

import os
import shlex
from importlib.resources import files
from pathlib import Path

import click
from rich.text import Text

from agent_r1.commands.command import FilePath, json_option, show
from agent_r1.core.errors import InvalidInput
from agent_r1.store.atomic_fs import atomic_dir

SUFFIX = ".template"
"""The suffix of template files. Without this suffix, a template would be a module of this package."""


@click.command()
@click.argument("folder", metavar="NAME", type=FilePath())
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Write a new project that can be trained at once.

    NAME is the new folder of the project. The folder gets an agent (a tool, a reward, tasks), a test of the agent,
    settings, and a README.
    """
    written = write_project(folder)
    run = f"cd {shlex.quote(str(folder))} && agent-r1 train agent.py --config train.toml"
    text = Text(f"{folder}: {', '.join(written)}\nto train it: {run}")
    show(as_json, {"folder": str(folder), "files": written}, text)


def write_project(folder: Path) -> list[str]:
    """Write the files of a new project to ``folder``, and return the names of the files.

    Raise InvalidInput if the folder exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise InvalidInput("NAME", got=f"{folder}, which exists", do="give the name of a new folder")
    templates = [path for path in (files("agent_r1") / "templates" / "project").iterdir() if path.name.endswith(SUFFIX)]
    try:
        with atomic_dir(folder) as temporary:
            for template in templates:
                text = template.read_text(encoding="utf-8").replace("{name}", folder.absolute().name)
                (temporary / template.name.removesuffix(SUFFIX)).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # without the name of the temporary folder
        raise InvalidInput("NAME", got=f"{folder}: {reason}", do="give a folder that can be written") from None
    return sorted(template.name.removesuffix(SUFFIX) for template in templates)
