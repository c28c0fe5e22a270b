"""A cache of folders on disk. Each folder is made once, from a known origin, and is verified at each use."""

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
"""The inputs from which a folder is made, such as ``{"conversion": 2, "sha256": "9f86d0.."}``."""


def build_once(folder: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return ``folder`` with the files that ``make`` writes. The files are written only once.

    ``origin`` identifies the inputs from which the files are made, such as ``{"conversion": 2, "sha256": "9f86d0.."}``.
    ``make`` is called if the folder is missing or damaged, or was made from a different ``origin``. The argument of
    ``make`` is a temporary folder, which becomes ``folder`` after ``make`` returns. So a killed process leaves no
    incomplete folder. If several processes call this function, one process calls ``make``, and the other processes
    wait.

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
    """Return whether :func:`build_once` made ``folder`` from ``origin``, and no file of the folder has changed since
    then.

    The manifest in the folder holds the origin and the checksums of the files.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest == {"origin": dict(origin), "files": _checksums(folder)}
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``file`` during the ``with`` block. If the process is killed, the lock is released."""
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
    """Return the sha256 of each file in the folder except the manifest, by the path of the file in the folder.

    Example:
        {"config.json": "9f86d0..", "tokenizer.json": "60303a.."}
    """
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums
