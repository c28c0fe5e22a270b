"""The files that a run's tasks come from, by their digests: a run goes on with what it began with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.record import Happened
from agent_r1.store.reader import RunReader
from agent_r1.train.config import TrainConfig

READ = "read"
"""The kind of an event that names a file or folder and its digest: ``data questions.json sha256 9f86..``."""


def events_of(config: TrainConfig) -> tuple[Happened, ...]:
    """What a run reads its questions and passages from; nothing of names that are no files here (the hub's)."""
    named = {"data": config.data, "corpus": None if config.corpus is None else Path(config.corpus)}
    there = {what: path for what, path in named.items() if path is not None and path.exists()}
    return tuple(Happened(READ, f"{what} {path} sha256 {_digest(path)}") for what, path in there.items())


def check_inputs(run: Path, events: tuple[Happened, ...]) -> None:
    """Raise InvalidInput where a file is not what it was when the run read it last."""
    with closing(RunReader(run)) as reader:
        before = _digests(event for event in reader.events() if event.kind == READ)
    for what, digest in _digests(iter(events)).items():
        if before.get(what, digest) != digest:
            got = f"other contents than the run's: sha256 {digest[:12]}.., not {before[what][:12]}.."
            raise InvalidInput(what, got=got, do="put back what the run began with, or begin a new run")


def _digests(events: Iterator[Happened]) -> Mapping[str, str]:
    return {event.detail.split()[0]: event.detail.split()[-1] for event in events}


def _digest(path: Path) -> str:
    """The sha256 of a file; of a folder, that of its files' names and digests."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {_digest(one)}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
