"""Manifests: the files of a saved folder with their hashes, so that every later change is detected.

A manifest is the file ``manifest.json`` of the folder:

{"format": 5, "model": "9f86..", "tokenizer": "60ba..", "template": "2c26..", "weights": "fcde..",
 "ledger": {"row": 8123, "seal": "9f86.."}, "files": {"model.safetensors": {"size": 843008, "sha256": "d7a8.."}}}

The entries "model" to "weights" are the fields of a :class:`ModelFingerprint`. "ledger" is the last seal of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.files import DISK, Disk
from agent_r1.store.ledger import Seal

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 5

MODEL, CHECKPOINTS, STEP = "model", "checkpoints", "step-"


class CorruptCheckpoint(AgentR1Error):
    """Raised if a saved model or checkpoint is damaged. The message names the problem in one line."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The sha256 hashes that identify a saved model.

    Attributes:
        model: the hash of the configuration, and of the names, shapes and types of the parameters.
        tokenizer: the hash of the rules by which the tokenizer splits text.
        template: the hash of the chat template.
        weights: the checksum of the weights.
    """

    model: str
    tokenizer: str
    template: str
    weights: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of the manifest of a saved folder.

    ``seal`` is the last seal (a hash of all rows) that the run had when the folder was saved. ``seal`` is None if the
    folder belongs to no run.
    """

    fingerprint: ModelFingerprint
    seal: Seal | None
    files: Mapping[str, FileEntry]


def write_manifest(folder: Path, fingerprint: ModelFingerprint, seal: Seal | None, disk: Disk = DISK) -> None:
    """Write the manifest of the files that are in a folder now.

    ``seal`` is the last seal (a hash of all rows) of the run; None if the folder belongs to no run.
    """
    files = {path.relative_to(folder).as_posix(): asdict(_hash_entry(path)) for path in sorted(_list_files(folder))}
    ledger = None if seal is None else seal.to_json()
    text = json.dumps({"format": MANIFEST_FORMAT, **asdict(fingerprint), "ledger": ledger, "files": files}, indent=2)
    disk.write(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        CorruptCheckpoint: the manifest cannot be read.
        InvalidInput: this version of agent-r1 does not read the manifest's format.
    """
    try:
        data: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = data.pop("format")
        if found != MANIFEST_FORMAT:
            age = "newer" if found > MANIFEST_FORMAT else "older"
            do = f"use the agent-r1 that wrote it; this one reads format {MANIFEST_FORMAT}"
            raise InvalidInput("saved folder", got=f"{folder} of format {found}, which is {age}", do=do)
        files = {name: FileEntry(**entry) for name, entry in data.pop("files").items()}
        ledger = data.pop("ledger")
        return Manifest(ModelFingerprint(**data), None if ledger is None else Seal.from_json(ledger), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{folder} has no readable manifest: {type(error).__name__}: {error}") from error


def check_manifest(folder: Path) -> Manifest:
    """Compare every file of a folder with the manifest, and return the manifest.

    Raises:
        CorruptCheckpoint: a file is missing, additional or changed, or the manifest cannot be read.
        InvalidInput: this version of agent-r1 does not read the manifest's format.
    """
    manifest = read_manifest(folder)
    try:
        found = {path.relative_to(folder).as_posix() for path in _list_files(folder)}
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be listed: {error}") from error
    for name in sorted(manifest.files.keys() - found):
        raise CorruptCheckpoint(f"{folder} lacks {name}")
    for name in sorted(found - manifest.files.keys()):
        raise CorruptCheckpoint(f"{folder} holds {name}, which is not in its manifest")
    for name, entry in manifest.files.items():
        try:
            changed = _hash_entry(folder / name) != entry
        except OSError as error:
            raise CorruptCheckpoint(f"{folder} holds a {name} that cannot be read: {error}") from error
        if changed:
            raise CorruptCheckpoint(f"{folder} holds a {name} that has changed")
    return manifest


def sizes_match(folder: Path) -> bool:
    """Return whether all files in the manifest exist and have the recorded sizes. Return False without a manifest."""
    try:
        entries = read_manifest(folder).files.items()
        return all((folder / name).stat().st_size == entry.size for name, entry in entries)
    except (AgentR1Error, OSError):
        return False


def list_checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first. The checkpoints are not checked."""
    folders = [path for path in (run / CHECKPOINTS).glob(f"{STEP}*") if path.name.removeprefix(STEP).isdecimal()]
    return sorted(folders, key=checkpoint_step, reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps that were taken before a checkpoint was saved."""
    return int(checkpoint.name.removeprefix(STEP))


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return (path for path in found if not path.name.startswith("."))


def _hash_entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, hash_file(path))
