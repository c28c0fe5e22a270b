"""Temporary folders that do not stay behind, even if their process is killed.

A process locks a file in each of its temporary folders. The kernel releases the lock when the process ends. The next
process that makes a folder with the same prefix removes the unlocked folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".lock"


class TemporaryFolder:
    """A new folder for the files of this process. Other processes may remove the folder after this process has ended.

    Args:
        prefix: the first part of the folder's name, such as "agent-r1-vllm-".
        parent: the folder that contains the new folder. None: the system's folder for temporary files.

    Raises OSError if the folder cannot be made.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        place = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(prefix, place)
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))
        self._descriptor = _lock(self.path)

    def remove(self) -> None:
        """Remove the folder with all its files. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """Let the folder stay after the process ends."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove each temporary folder in ``parent`` whose name begins with ``prefix`` and whose process has ended."""
    for folder in parent.glob("*"):
        if not folder.name.startswith(prefix):
            continue
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is kept, is not a folder of this module, or belongs to another user
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # if not, the folder was kept after the file was opened
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its process is running
            continue
        finally:
            os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Lock a new file in ``folder``, and return its descriptor. Closing the descriptor releases the lock.

    Return None if the file system has no locks. Then :func:`remove_abandoned` never removes the folder.
    """
    file = folder / f"{LOCK}.new"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.rename(folder / LOCK)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
