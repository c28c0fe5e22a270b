"""Shared parts of task sets that are generated from a seed."""

from __future__ import annotations

from pathlib import Path

from agent_r1.core.errors import InvalidInput


def refuse_files(taskset: str, data: Path | None, corpus: str | Path | None) -> None:
    """Raise InvalidInput if ``data`` or ``corpus`` is given. The message contains the name ``taskset``."""
    for what, given in (("data", data), ("corpus", corpus)):
        if given is not None:
            raise InvalidInput(what, got=given, do=f"leave it out: {taskset} is generated")
