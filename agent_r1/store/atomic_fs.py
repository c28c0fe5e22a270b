"""Atomic changes of files and folders, which survive a power loss."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Disk:
    """File system operations. Tests replace single methods by methods that raise errors."""

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        write(path)

    def sync(self, path: Path) -> None:
        """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, folder: Path) -> None:
        """Remove a folder; errors are ignored."""
        shutil.rmtree(folder, ignore_errors=True)


DISK = Disk()


@contextmanager
def atomic_dir(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """Yield a hidden temporary folder, which is renamed to ``folder`` at the end of the ``with`` block.

    After an exception in the block, the temporary folder is removed. A killed process can leave it behind (see
    :func:`remove_leftovers`). Raises OSError if ``folder`` exists and is not empty.
    """
    with _temporary_dir(folder, disk) as temporary:
        yield temporary
        _sync_tree(temporary, disk)
        disk.rename(temporary, folder)
    _sync_parents(folder, disk)


@contextmanager
def atomic_replace_dir(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """Yield a hidden temporary folder, which replaces ``folder`` at the end of the ``with`` block.

    ``folder`` may exist. After an exception in the block, ``folder`` is unchanged.
    """
    with _temporary_dir(folder, disk) as temporary:
        yield temporary
        _sync_tree(temporary, disk)
        old = mark_for_removal(folder, disk) if folder.exists() else None
        disk.rename(temporary, folder)
    _sync_parents(folder, disk)
    if old is not None:
        disk.remove(old)


def mark_for_removal(folder: Path, disk: Disk = DISK) -> Path:
    """Rename a folder to a hidden name before its removal. Return the new path."""
    hidden = hidden_path(folder)
    disk.rename(folder, hidden)
    return hidden


def remove_leftovers(folder: Path, disk: Disk = DISK) -> None:
    """Remove the hidden folders that a killed save of ``folder`` left behind."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        disk.remove(path)


def atomic_write(path: Path, data: bytes, disk: Disk = DISK) -> None:
    """Write a file atomically: if the process is killed, the file has its complete old or new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_path(path)
    try:
        disk.write(temporary, lambda place: place.write_bytes(data))
        disk.sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    disk.sync(path.parent)


def hidden_path(path: Path) -> Path:
    """Return a new hidden name beside ``path``. :func:`remove_leftovers` recognizes such names."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}"


@contextmanager
def _temporary_dir(folder: Path, disk: Disk) -> Iterator[Path]:
    temporary = hidden_path(folder)
    try:
        disk.make(temporary)
        yield temporary
    except BaseException:
        disk.remove(temporary)
        raise


def _sync_tree(folder: Path, disk: Disk) -> None:
    for path in (*sorted(folder.rglob("*")), folder):
        disk.sync(path)


def _sync_parents(folder: Path, disk: Disk) -> None:
    # Sync the grandparent too, because the first save of a run also creates the parent.
    for parent in (folder.parent, folder.parent.parent):
        disk.sync(parent)
