"""Create the folder of an export. The folder appears complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.store import is_run
from agent_r1.store.atomic_fs import atomic_dir, atomic_replace_dir

MARKER = "export.json"
"""The file that describes an export. ``--force`` replaces a folder only if it has this file or is empty."""


@contextmanager
def new_export(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder, and rename this folder to ``out`` at the end of the ``with`` block.

    If the block raises an error, ``out`` does not change. An existing ``out`` is replaced only with ``force``, and only
    if ``out`` is an earlier export or an empty folder.

    Raises:
        InvalidInput: ``out`` exists and cannot be replaced.
        AgentR1Error: the folder cannot be written.
    """
    require_new_export(out, force)
    try:
        if os.path.lexists(out):
            with atomic_replace_dir(out) as temporary:
                yield temporary
        else:
            with atomic_dir(out) as temporary:
                yield temporary
    except (OSError, ValueError) as error:
        raise AgentR1Error(f"{out} could not be written: {error}") from error


def require_new_export(out: Path, force: bool) -> None:
    """Raise InvalidInput if ``out`` exists. With ``force``, ``out`` may be an earlier export or an empty folder."""
    if not os.path.lexists(out):
        return
    if not force:
        raise InvalidInput("OUT", got=f"{out}, which exists", do="name a new folder, or give --force to replace it")
    if out.is_symlink() or not out.is_dir() or is_run(out) or not (is_export(out) or not any(out.iterdir())):
        do = "name a new folder: --force replaces only earlier exports"
        raise InvalidInput("OUT", got=f"{out}, which is not an earlier export", do=do)


def is_export(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def write_marker(folder: Path, **facts: object) -> None:
    """Write ``facts`` to ``export.json`` in ``folder``, which marks the folder as an export."""
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
