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

    def write(self, path: Path, start: int, content: bytes) -> None:
        """Write a piece of the own file with the name of ``path``."""
        write_piece(self.folder() / path.name, start, content)

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


def write_piece(path: Path, start: int, content: bytes) -> None:
    """Write ``content`` at the byte ``start`` of a file. The first piece replaces the file."""
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(content)


def send_files(write: Callable[[Path, int, bytes], object], paths: Sequence[Path]) -> None:
    """Send files to another machine, where ``write(path, start, content)`` writes a piece of a file."""
    for path in paths:
        with path.open("rb") as file:
            write(path, 0, file.read(CHUNK))  # also of an empty file
            while content := file.read(CHUNK):
                write(path, file.tell() - len(content), content)
