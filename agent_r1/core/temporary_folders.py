"""Temporary folders that do not stay behind, even if their process is killed.

A process holds a lock on a file in each of its temporary folders. When the process ends, even by SIGKILL, the kernel
releases the lock. The next process that makes a folder with the same prefix removes the folders whose lock is free.

A process id in the name of the folder would not be enough: processes on several machines or in several containers can
make folders in one parent folder, and two of these processes can have equal ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".lock"
"""The name of the locked file in a temporary folder."""


class TemporaryFolder:
    """A new folder for the files of this process. When the process has ended, other processes may remove the folder.

    Args:
        prefix: the first part of the folder's name, such as "agent-r1-vllm-". The process id and a random text follow.
        parent: the place of the folder; None: the system's place for temporary files.

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
        """Let the folder stay after the end of the process. No process removes it."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the temporary folders in ``parent`` whose names begin with ``prefix``, and whose processes have ended."""
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
    """Lock a new file in ``folder``, and return its file descriptor. The lock is held until the descriptor is closed.

    The file gets its name after it is locked, because another process may remove a folder whose lock is free. Return
    None if the file system has no locks. Then no other process removes the folder.
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
