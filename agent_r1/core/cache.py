"""A cache of folders on disk. Each folder is made once, and is verified at each use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"

Origin = Mapping[str, str | int]
"""The inputs from which a cached folder is made, such as ``{"conversion": 2, "sha256": "9f86d0.."}``."""


def build_once(folder: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return ``folder``. If it is missing, damaged or made from a different ``origin``, call ``make`` first.

    ``make`` writes to a temporary folder, which then becomes ``folder``. So a killed process leaves no incomplete
    folder. If several processes call this function, only one calls ``make``, and the others wait.

    Raise OSError if the folder cannot be written or locked. Errors of ``make`` are raised unchanged.
    """
    if is_valid(folder, origin):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if is_valid(folder, origin):  # another process has made the folder
            return folder
        temporary = folder.parent / f".{folder.name}.part"
        shutil.rmtree(temporary, ignore_errors=True)  # files that a killed process has left
        try:
            temporary.mkdir()
            make(temporary)
            _write_manifest(temporary, origin)
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def is_valid(folder: Path, origin: Origin) -> bool:
    """Return whether ``folder`` was made from ``origin``, and no file has changed since."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest == {"origin": dict(origin), "files": _checksums(folder)}
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_manifest(folder: Path, origin: Origin) -> None:
    manifest = {"origin": dict(origin), "files": _checksums(folder)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())


def _checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file except the manifest: ``{"config.json": "9f86d0.."}``."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums
