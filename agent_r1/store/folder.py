"""Create, find and reopen the folder of a run."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import atomic_dir
from agent_r1.store.schema import SCHEMA_VERSION, TABLES, insert, open_writer, transaction
from agent_r1.store.writer import RunWriter

DATABASE = "run.db"
CONFIG_FILE = "config.json"


def default_run_name(task: str, algorithm: str, now: datetime) -> str:
    """Return the name of a new run if the user gave no name. ``task`` is the name or the path of a task set."""
    return f"{Path(task).stem}-{algorithm}-{now:%Y%m%d-%H%M%S}"


def run_folder(run: str) -> Path:
    """Return the folder of a run: ``run`` if it is a path, ``runs/NAME`` if it is a name without a slash."""
    return Path(run) if os.sep in run else Path("runs") / run


def run_argument(folder: Path) -> str:
    """Return the argument that names a run on the command line, quoted for the shell."""
    text = folder.name if folder == run_folder(folder.name) else str(folder)
    return shlex.quote(text if run_folder(text) == folder else f".{os.sep}{text}")


def path_argument(file: Path) -> str:
    """Return the path of a file for the command line, quoted for the shell."""
    return shlex.quote(str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file))


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / DATABASE)  # also False if the text cannot be a path


def create_run(folder: Path, config: Mapping[str, Any]) -> RunWriter:
    """Create the folder of a new run, completely or not at all. Return the writer of the run.

    ``config`` is the resolved configuration, JSON values only. Raise InvalidInput if the folder exists or cannot be
    written.
    """
    require_new_run(folder)
    text = json.dumps(config, indent=2)
    try:
        with atomic_dir(folder) as temporary:
            _fill(temporary, folder.name, text)
    except (OSError, sqlite3.Error, ValueError) as error:
        raise InvalidInput("run", got=f"{folder}: {error}", do="give a --run in a folder that can be written") from None
    return RunWriter(folder / DATABASE)


def require_new_run(folder: Path) -> None:
    if os.path.lexists(folder):
        do = "give another --run" + (", or --resume to continue this one" if is_run(folder) else "")
        raise InvalidInput("run", got=f"{folder}, which exists", do=do)


def reopen_run(folder: Path) -> RunWriter:
    """Return the writer of an existing run. Call its ``open_segment`` before recording events.

    Raises InvalidInput if ``folder`` holds no run, or if the run cannot be written.
    """
    if not is_run(folder):
        raise InvalidInput("run", got=f"{folder}, which holds no {DATABASE}", do="give the folder of a run")
    try:
        return RunWriter(folder / DATABASE)
    except (OSError, sqlite3.Error) as error:
        raise InvalidInput("run", got=f"{folder}: {error}", do="give a run in a folder that can be written") from None


def _fill(folder: Path, run: str, config: str) -> None:
    (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
    with closing(open_writer(folder / DATABASE)) as connection:
        connection.executescript(f"BEGIN; {TABLES} COMMIT;")  # one transaction: a sync per table would take longer
        with transaction(connection):
            meta = {"schema": str(SCHEMA_VERSION), "run": run, "created": datetime.now().isoformat()}
            insert(connection, "meta", list(meta.items()))
            insert(connection, "segments", [(1, 0, time.time(), config)])
