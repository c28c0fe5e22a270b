"""A function that opens a file whose path comes from the user."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. Raise OSError for other files, such as a FIFO."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # the path has a NUL character, or cannot be encoded
        raise OSError(errno.EINVAL, str(error)) from None
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return path.open("rb")
