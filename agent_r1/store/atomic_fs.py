"""Folders and files that appear whole or not at all, and stay when the power goes."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """Every change that saving makes to the disk, an operation each, so that a test can let any one of them fail."""

    def make(self, folder: Path) -> None:
        """Make a folder, and those above it."""
        folder.mkdir(parents=True)

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        """Let ``put`` write a file, or files in a folder."""
        put(place)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or a folder's names, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, folder: Path) -> None:
        """Remove what of a folder can be removed."""
        shutil.rmtree(folder, ignore_errors=True)


DISK = Disk()


def _put(place: Path, data: bytes) -> None:
    place.write_bytes(data)


@contextmanager
def appearing(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """A hidden folder beside ``folder`` to fill; it takes that name when the block ends without an exception.

    By then every file in it is on the disk. After an exception nothing is left; after a kill the hidden
    folder is. Raises OSError where ``folder`` exists with something in it.
    """
    with _filling(folder, disk) as half:
        yield half
        _sync_all(half, disk)
        disk.rename(half, folder)
    _sync_above(folder, disk)


@contextmanager
def replacing(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """As :func:`appearing`, but what stands under that name makes way, once the new folder is on the disk."""
    with _filling(folder, disk) as half:
        yield half
        _sync_all(half, disk)
        old = hide(folder, disk) if folder.exists() else None
        disk.rename(half, folder)
    _sync_above(folder, disk)
    if old is not None:
        disk.remove(old)


def hide(folder: Path, disk: Disk = DISK) -> Path:
    """Give a folder a name under which nobody takes it for what it was, before it is removed."""
    hidden = _hidden(folder)
    disk.rename(folder, hidden)
    return hidden


def clear_hidden(folder: Path, disk: Disk = DISK) -> None:
    """Remove what a save of ``folder`` left half done when it was killed."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        disk.remove(path)


def _hidden(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.{uuid.uuid4().hex}"


@contextmanager
def _filling(folder: Path, disk: Disk) -> Iterator[Path]:
    half = _hidden(folder)
    try:
        disk.make(half)
        yield half
    except BaseException:
        disk.remove(half)
        raise


def _sync_all(folder: Path, disk: Disk) -> None:
    for path in (*sorted(folder.rglob("*")), folder):
        disk.sync(path)


def _sync_above(folder: Path, disk: Disk) -> None:
    for above in (folder.parent, folder.parent.parent):  # the one further up too: this may be the first save of a run
        disk.sync(above)


def write_whole(path: Path, data: bytes, disk: Disk = DISK) -> None:
    """Put a file in its place, over what was there; after a kill the old one or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = _hidden(path)
    try:
        disk.write(half, lambda place: _put(place, data))
        disk.sync(half)
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    disk.sync(path.parent)
