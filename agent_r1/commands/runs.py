"""Find the folder of a run from the argument of a command: the name or the path of the run."""

from __future__ import annotations

import os
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from agent_r1.store import is_run, run_folder

RUNS = Path("runs")


def named_folder(run: str) -> Path:
    """Return the folder that the argument ``run`` means.

    If ``run`` contains a slash, such as ``/data/demo``, ``run`` is the path of the folder. If ``run`` is a name, such
    as ``demo``, the folder is ``runs/demo``, or ``demo`` if the folder ``demo`` exists and ``runs/demo`` does not.
    """
    folder = run_folder(run)
    return Path(run) if os.path.isdir(run) and not os.path.isdir(folder) else folder


def find_run(run: str) -> Path:
    """Return the folder of the run that ``run`` names. Raise InvalidInput if there is no such run."""
    folder = named_folder(run)
    if not is_run(folder):
        raise no_run(run, folder)
    return folder


def no_run(run: str, folder: Path) -> InvalidInput:
    """Return the error for a ``run`` that does not exist. The error suggests a similar name in runs/."""
    there = sorted(file.parent.name for file in RUNS.glob("*/run.db"))
    what = f"{folder} holds no run" if os.path.isdir(folder) else f"there is no folder {folder}"
    do = f"{suggest(run, there)} give the name of a run in runs/, or the folder of one".strip()
    return InvalidInput("run", got=f"{run}, but {what}", do=do)
