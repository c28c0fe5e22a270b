"""Files of ranks on machines that do not see the folder of the run. They travel through the ranks' connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.files import TemporaryFolder

CHUNK = 32 * 2**20
"""The largest number of bytes of a file in one message."""


class OwnFiles:
    """The files that a rank writes or gets on a machine that does not see the run's folder."""

    def __init__(self) -> None:
        self._folder: TemporaryFolder | None = None

    def folder(self) -> Path:
        if self._folder is None:
            self._folder = TemporaryFolder("agent-r1-rank-")
        return self._folder.path

    def read(self, name: str, start: int) -> bytes:
        """Return at most ``CHUNK`` bytes of a file, from the byte ``start`` on; b"" at its end."""
        with (self.folder() / name).open("rb") as file:
            file.seek(start)
            return file.read(CHUNK)

    def append(self, path: Path, content: bytes) -> None:
        """Append to the own file with the name of ``path``."""
        with (self.folder() / path.name).open("ab") as file:
            file.write(content)

    def drop(self) -> None:
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def fetch_file(read: Callable[[str, int], bytes], path: Path) -> None:
    """Write a file of another machine, which ``read(name, start)`` returns in pieces, to ``path``."""
    try:
        with path.open("wb") as file:
            while content := read(path.name, file.tell()):
                file.write(content)
    except OSError as error:
        raise AgentR1Error(f"{path} could not be written: {error}") from error


def send_files(append: Callable[[Path, bytes], object], paths: Sequence[Path]) -> None:
    """Send files to another machine, where ``append(path, content)`` appends to a file."""
    for path in paths:
        with path.open("rb") as file:
            append(path, b"")
            while content := file.read(CHUNK):
                append(path, content)
