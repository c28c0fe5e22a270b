"""What a run's tasks come from, by digests: a run goes on with what it began with, wherever that lies by now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.messages import to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.store.reader import RunReader
from agent_r1.training.config import TrainConfig

READ, TASKS = "read", "tasks"
"""The kind of an event that names what was read and its digest: ``data questions.json sha256 9f86..``."""


def events_of(config: TrainConfig, world: TaskSet) -> tuple[LogEvent, ...]:
    """What a run learns from: its files of questions and passages, where they are files here (and no name on the
    hub), and the tasks to train and to validate on."""
    files = {what: path for what, path in _located(config).items() if path.exists()}
    said = [f"{what} {path} sha256 {_digest(path)}" for what, path in files.items()]
    splits = dict.fromkeys(["train", world.validation or "train"])
    tasks = _digest_of(task for split in splits for task in world.tasks(split))
    return tuple(LogEvent(READ, line) for line in (*said, f"{TASKS} sha256 {tasks}"))


def check_inputs(run: Path, config: TrainConfig, events: tuple[LogEvent, ...]) -> None:
    """Raise InvalidInput where something is not what it was when the run read it last, or cannot be compared."""
    with closing(RunReader(run)) as reader:
        before, own = _digests(event for event in reader.events() if event.kind == READ), reader.config()
    now = _digests(iter(events))
    for what, digest in now.items():
        known = before.get(what)
        if known is not None and known != digest:
            got = f"others than the run's: sha256 {digest[:12]}.., not {known[:12]}.."
            raise InvalidInput(what, got=got, do="put back what the run began with, or begin a new run")
    for what, asked in config.model_dump(mode="json", include={"data", "corpus"}).items():
        alone = str(asked).endswith(".toml")  # it names files of its own, which are not compared
        if asked != own[what] and (alone or not (what in now and what in before)):
            do = f"leave it out: {run} goes on with {own[what] or 'none'}, to which it cannot be compared"
            raise InvalidInput(what, got=asked, do=do)


def _located(config: TrainConfig) -> dict[str, Path]:
    named = {"data": config.data, "corpus": config.corpus}
    return {what: Path(place) for what, place in named.items() if place is not None}


def _digests(events: Iterator[LogEvent]) -> Mapping[str, str]:
    return {event.detail.split()[0]: event.detail.split()[-1] for event in events}


def _digest(path: Path) -> str:
    """The sha256 of a file; of a folder, that of its files' names and digests."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {_digest(one)}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest_of(tasks: Iterable[Task]) -> str:
    """The sha256 of tasks in their order."""
    digest = hashlib.sha256()
    for task in tasks:
        said = [task.id, task.split, [to_openai(message) for message in task.messages]]
        digest.update(_text([*said, _data(task)]).encode() + b"\n")
    return digest.hexdigest()


def _data(task: Task) -> object:
    try:
        return _plain(task.data)
    except RecursionError:  # it holds itself
        return sorted(map(str, task.data))


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: object) -> object:
    """As JSON can hold it. Of what is no plain value, dataclass or collection of them, the type alone counts."""
    match value:
        case None | bool() | float() | str():
            return value
        case int():
            return hex(value)  # in decimal digits Python refuses large ones
        case bytes() | bytearray():
            return value.hex()
        case Mapping():
            return {_text(_plain(key)): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case set() | frozenset():
            return sorted(_text(_plain(item)) for item in value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return type(value).__qualname__
