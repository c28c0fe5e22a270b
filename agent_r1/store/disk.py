"""Folders that appear whole or not at all, and stay when the power goes."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A hidden folder beside ``folder`` to fill; it takes that name when the block ends without an exception.

    By then every file in it is on the disk. After an exception nothing is left; after a kill the hidden
    folder is. Raises OSError where ``folder`` exists with something in it.
    """
    half = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    half.mkdir(parents=True)
    try:
        yield half
        for path in (*half.rglob("*"), half):
            _sync(path)
        os.rename(half, folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
