"""Shared parts of task sets that are generated from a seed."""

from __future__ import annotations

from pathlib import Path

from agent_r1.core.errors import InvalidInput


def refuse_files(taskset: str, data: Path | None, corpus: str | Path | None) -> None:
    """Raise InvalidInput if ``data`` or ``corpus`` is given. ``taskset`` is the name in the error."""
    for what, given in (("data", data), ("corpus", corpus)):
        if given is not None:
            raise InvalidInput(what, got=given, do=f"leave it out: {taskset} is generated")
