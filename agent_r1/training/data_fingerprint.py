"""Fingerprints of a run's data, which must be unchanged when the run is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.task_hash import hash_tasks
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import hash_file
from agent_r1.store.reader import RunReader
from agent_r1.training.config import TasksetConfig, TrainConfig

FINGERPRINT, TASKS = "fingerprint", "tasks"
"""Events of the kind ``FINGERPRINT`` contain a hash of a run's data.

The text of such an event is, for example, ``data questions.json sha256 9f86..`` or ``tasks sha256 60ba..``. If the text
begins with ``TASKS``, the hash is the hash of the training and validation tasks.
"""


def data_hashes(config: TasksetConfig, taskset: TaskSet) -> Mapping[str, str]:
    """Return the sha256 hashes of a run's data by name: "tasks", and "data" and "corpus" if they exist."""
    return _hashes(fingerprint_data(config, taskset))


def fingerprint_data(config: TasksetConfig, taskset: TaskSet) -> tuple[LogEvent, ...]:
    """Return one event with the sha256 hash of the training and validation tasks.

    If ``config.data`` or ``config.corpus`` is a local path, there is one more event for the contents of the path.
    """
    lines = []
    for name, place in (("data", config.data), ("corpus", config.corpus)):
        if place is not None and (path := Path(place)).exists():
            lines.append(f"{name} {path} sha256 {_hash_path(path)}")
    splits = dict.fromkeys(["train", taskset.validation or "train"])
    lines.append(f"{TASKS} sha256 {hash_tasks(task for split in splits for task in taskset.tasks(split))}")
    return tuple(LogEvent(FINGERPRINT, line) for line in lines)


def check_data_unchanged(run: Path, config: TrainConfig, events: Iterable[LogEvent]) -> None:
    """Raise InvalidInput if the data of a resumed run have changed since the run began.

    If ``config`` has a new path, the hashes of the old and the new contents must be known and equal. A new path of a
    TOML file is never accepted, because the files listed in the TOML file have no hashes.

    Args:
        run: the folder of the run, which has recorded the hashes of its data.
        config: the configuration with which the run is resumed.
        events: the hashes of the present data: the result of :func:`fingerprint_data` for ``config``.
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
    """Return the hashes in fingerprint events, such as {"data": "9f86d0.."}. A later event replaces an earlier
    event with an equal name."""
    return {event.detail.split()[0]: event.detail.split()[-1] for event in events}


def _hash_path(path: Path) -> str:
    """Return the sha256 of a file, or of the names and hashes of a folder's files. Hidden files are ignored."""
    if path.is_file():
        return hash_file(path)
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {hash_file(one)}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
