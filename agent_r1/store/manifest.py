"""Manifests: what a saved folder holds, file by file, so that every change to it is seen.

{"format": 3, "model": "9f86..", "tokenizer": "60ba..", "template": "2c26..", "weights": "fcde..",
 "files": {"model.safetensors": {"size": 843008, "sha256": "d7a8.."}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.store.atomic_fs import DISK, Disk

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 3

MODEL, CHECKPOINTS, STEP = "model", "checkpoints", "step-"


class Damaged(AgentR1Error):
    """A saved folder is not what it was when it was saved; says in one line what is wrong."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What was saved, by digests: the shape of the model, its tokenizer, its chat template, its weights."""

    model: str
    tokenizer: str
    template: str
    weights: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a saved folder is, and its files by name."""

    identity: Identity
    files: Mapping[str, Entry]


def write_manifest(folder: Path, identity: Identity, disk: Disk = DISK) -> None:
    """Describe the files that are in a folder now, in a file of their own."""
    files = {path.relative_to(folder).as_posix(): asdict(_entry(path)) for path in sorted(_files(folder))}
    text = json.dumps({"format": MANIFEST_FORMAT, **asdict(identity), "files": files}, indent=2)
    disk.write(folder / MANIFEST, lambda path: _put(path, text))


def read_manifest(folder: Path) -> Manifest:
    """What a folder says of itself. Raises Damaged where that cannot be read, InvalidInput where it is of another
    format: none is converted."""
    try:
        data: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = data.pop("format")
        if found != MANIFEST_FORMAT:
            age = "newer" if found > MANIFEST_FORMAT else "older"
            do = f"use the agent-r1 that wrote it; this one reads format {MANIFEST_FORMAT}"
            raise InvalidInput("saved folder", got=f"{folder} of format {found}, which is {age}", do=do)
        files = {name: Entry(**entry) for name, entry in data.pop("files").items()}
        return Manifest(Identity(**data), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} has no manifest that can be read: {type(error).__name__}: {error}") from error


def check_whole(folder: Path) -> Manifest:
    """The manifest of a folder whose every file is as it was saved, and that holds no other. Raises as reading does."""
    manifest = read_manifest(folder)
    found = _names(folder)
    for name in sorted(manifest.files.keys() - found):
        raise Damaged(f"{folder} lacks {name}")
    for name in sorted(found - manifest.files.keys()):
        raise Damaged(f"{folder} holds {name}, which is not in its manifest")
    for name, entry in manifest.files.items():
        if _entry_of(folder, name) != entry:
            raise Damaged(f"{folder} holds a {name} that has changed")
    return manifest


def looks_whole(folder: Path) -> bool:
    """A quick look, without hashing gigabytes."""
    try:
        entries = read_manifest(folder).files.items()
        return all((folder / name).stat().st_size == entry.size for name, entry in entries)
    except (AgentR1Error, OSError):
        return False


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first, whole or not."""
    folders = [path for path in (run / CHECKPOINTS).glob(f"{STEP}*") if path.name.removeprefix(STEP).isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was taken."""
    return int(checkpoint.name.removeprefix(STEP))


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _files(folder: Path) -> Iterator[Path]:
    """What was saved: hidden files are left there by file managers and network disks."""
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return (path for path in found if not path.name.startswith("."))


def _names(folder: Path) -> set[str]:
    try:
        return {path.relative_to(folder).as_posix() for path in _files(folder)}
    except OSError as error:
        raise Damaged(f"{folder} cannot be listed: {error}") from error


def _entry_of(folder: Path, name: str) -> Entry:
    try:
        return _entry(folder / name)
    except OSError as error:
        raise Damaged(f"{folder} holds a {name} that cannot be read: {error}") from error


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        return Entry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
