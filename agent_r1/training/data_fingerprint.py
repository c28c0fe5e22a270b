"""Fingerprints of a run's data. A resumed run must use the same data, but the files can be in another place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.messages import to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import hash_file
from agent_r1.store.reader import RunReader
from agent_r1.training.config import TrainConfig

FINGERPRINT, TASKS = "fingerprint", "tasks"
"""The kind of an event with a fingerprint, and the name of the fingerprint of all tasks.

The text of such an event is ``data questions.json sha256 9f86..`` or ``tasks sha256 60ba..``.
"""


def fingerprint_data(config: TrainConfig, taskset: TaskSet) -> tuple[LogEvent, ...]:
    """Return events with the sha256 hashes of a run's data.

    One event is for the tasks of training and validation. ``config.data`` and ``config.corpus`` each have an event of
    their own if they are local files or folders. Example of the text of an event: "data dev.jsonl sha256 9f86d0..".
    """
    lines = []
    for name, place in (("data", config.data), ("corpus", config.corpus)):
        if place is not None and (path := Path(place)).exists():
            lines.append(f"{name} {path} sha256 {_hash_path(path)}")
    splits = dict.fromkeys(["train", taskset.validation or "train"])
    lines.append(f"{TASKS} sha256 {_hash_tasks(task for split in splits for task in taskset.tasks(split))}")
    return tuple(LogEvent(FINGERPRINT, line) for line in lines)


def check_data_unchanged(run: Path, config: TrainConfig, events: Iterable[LogEvent]) -> None:
    """Raise InvalidInput if the data differs from the data that the run used before.

    Also raise InvalidInput if the setting ``data`` or ``corpus`` has a new value, and the new data cannot be compared
    with the old data. Only data with a hash can be compared. A TOML file cannot be compared, because it names further
    files, which have no hash.

    Args:
        run: the folder of the run.
        config: the new configuration.
        events: the result of :func:`fingerprint_data` for the new configuration.
    """
    with closing(RunReader(run)) as reader:
        recorded, own = _hashes(event for event in reader.events() if event.kind == FINGERPRINT), reader.config()
    current = _hashes(events)
    for name, found in current.items():
        expected = recorded.get(name, found)
        if expected != found:
            got = f"others than the run's: sha256 {found[:12]}.., not {expected[:12]}.."
            raise InvalidInput(name, got=got, do="put back what the run began with, or start a new run")
    for name, value in config.model_dump(mode="json", include={"data", "corpus"}).items():
        is_list = str(value).endswith(".toml")  # the TOML file names further files, which have no fingerprint
        if value != own[name] and (is_list or not (name in current and name in recorded)):
            do = f"leave it out: {run} continues with {own[name] or 'none'}, to which it cannot be compared"
            raise InvalidInput(name, got=value, do=do)


def _hashes(events: Iterable[LogEvent]) -> dict[str, str]:
    """Return the hashes of events by name, such as {"data": "9f86d0.."}.

    A later event replaces an earlier event with the same name.
    """
    return {event.detail.split()[0]: event.detail.split()[-1] for event in events}


def _hash_path(path: Path) -> str:
    """Return the sha256 of a file, or of the names and hashes of all files in a folder.

    Files in a folder are ignored if their name begins with a dot.
    """
    if path.is_file():
        return hash_file(path)
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {hash_file(one)}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash_tasks(tasks: Iterable[Task]) -> str:
    """Return the sha256 of a sequence of tasks. Another order of the tasks gives another sha256."""
    total = hashlib.sha256()
    for task in tasks:
        try:
            data = _to_json(task.data)
        except RecursionError:  # the task's data contains itself
            data = sorted(map(str, task.data))
        messages = [to_openai(message.with_images_as_text()) for message in task.messages]
        images = [image.sha256 for message in task.messages for image in message.images]
        content = [task.id, task.split, messages, data, *images]
        total.update(_dump(content).encode() + b"\n")
    return total.hexdigest()


_dump = json.JSONEncoder(sort_keys=True).encode


def _to_json(value: object) -> object:
    """Convert a value to a value that JSON can represent. An object of an unknown type becomes the name of its type."""
    match value:
        case str() | None | bool() | float():
            return value
        case int():
            return hex(value)  # Python refuses to write very long integers in decimal
        case list() | tuple():  # before Mapping, an abstract class, whose check is slow
            return [_to_json(item) for item in value]
        case bytes() | bytearray():
            return value.hex()
        case dict() | Mapping():
            return {_dump(_to_json(key)): _to_json(item) for key, item in value.items()}
        case set() | frozenset():
            return sorted(_dump(_to_json(item)) for item in value)
    if is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    return type(value).__qualname__
