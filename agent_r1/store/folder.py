"""Where a run lives, and how its folder comes to be: complete or not at all."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.store.atomic_fs import appearing
from agent_r1.store.ledger import Ledger
from agent_r1.store.schema import SCHEMA_VERSION, TABLES, open_writer

DATABASE = "run.db"
CONFIGURATION = "config.json"


def default_run_name(task: str, algorithm: str, now: datetime) -> str:
    """The name of a run that was given none.

    Example:
        >>> default_run_name("tinywiki", "grpo", datetime(2026, 1, 2, 3, 4, 5))
        'tinywiki-grpo-20260102-030405'
    """
    return f"{task}-{algorithm}-{now:%Y%m%d-%H%M%S}"


def run_folder(run: str) -> Path:
    """The folder of a run: ``runs/NAME`` for a name, the folder itself where a path is given."""
    return Path(run) if os.sep in run else Path("runs") / run


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / DATABASE).is_file()


def create_run(folder: Path, config: Mapping[str, Any]) -> Ledger:
    """Make the folder of a new run and open its ledger.

    ``config`` is the resolved configuration, JSON values only. Nobody ever sees half
    a run. Raises InvalidInput where the folder exists
    already or cannot be written.
    """
    refuse_existing(folder)
    text = json.dumps(config, indent=2)
    try:
        with appearing(folder) as half:
            _fill(half, folder.name, text)
    except (OSError, sqlite3.Error, ValueError) as error:
        raise InvalidInput("run", got=f"{folder}: {error}", do="give a --run in a folder that can be written") from None
    return Ledger(folder / DATABASE)


def refuse_existing(folder: Path) -> None:
    """Raise InvalidInput where a run of that name cannot be new."""
    if os.path.lexists(folder):
        do = "give another --run" + (", or --resume to go on with this one" if is_run(folder) else "")
        raise InvalidInput("run", got=f"{folder}, which exists", do=do)


def reopen_run(folder: Path) -> Ledger:
    """Open the ledger of a run that stopped; what is to come belongs into a new lineage. Raises InvalidInput."""
    if not is_run(folder):
        raise InvalidInput("run", got=f"{folder}, which holds no {DATABASE}", do="give the folder of a run")
    try:
        return Ledger(folder / DATABASE)
    except (OSError, sqlite3.Error) as error:
        raise InvalidInput("run", got=f"{folder}: {error}", do="give a run in a folder that can be written") from None


def _fill(folder: Path, run: str, config: str) -> None:
    (folder / CONFIGURATION).write_text(config + "\n", encoding="utf-8")
    with closing(open_writer(folder / DATABASE)) as connection:
        connection.executescript(f"BEGIN; {TABLES}")  # one transaction: a sync for each table would take longer
        meta = {"schema": str(SCHEMA_VERSION), "run": run, "created": datetime.now().isoformat()}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        connection.execute("INSERT INTO lineages VALUES (1, 0, ?, ?)", (time.time(), config))
        connection.execute("COMMIT")
