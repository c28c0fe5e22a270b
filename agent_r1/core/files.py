"""Files: data files of the user, temporary folders, cached folders, and folders that are written as a whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.core.arguments import json_type, refuse_duplicates
from agent_r1.core.errors import InvalidInput


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


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One JSON object of a data file."""

    path: Path
    number: int  # from 1: the position in a JSON list, or the line in a JSONL file
    values: Mapping[str, Any]

    def error(self, got: str, do: str) -> InvalidInput:
        return InvalidInput(f"{self.path}, row {self.number}", got=got, do=do)

    def get_text(self, *names: str) -> str:
        """Return the stripped text of the first field in ``names`` that the record has."""
        found = next((name for name in names if name in self.values), None)
        if found is None:
            raise self.error(f"no {names[0]}", f"give every row a text under {' or '.join(map(repr, names))}")
        value = self.values[found]
        if isinstance(value, str) and value.strip():
            return value.strip()
        raise self.error(f"{found} = {describe_value(value)}", f"give every row a text under {found!r}")


def describe_value(value: object) -> str:
    """Return a value and its type for an error message, such as "1984 (integer)"."""
    text = repr(value)
    return "null" if value is None else f"{text if len(text) <= 60 else f'{text[:59]}…'} ({json_type(value)})"


def read_records(path: Path) -> Iterator[JsonRecord]:
    """Yield the records of a data file: a JSON list if the file begins with ``[``, otherwise JSONL."""
    empty = True
    try:
        with open_regular(path) as file:
            rows = enumerate(_parse(path, file.read(), 1), start=1) if _starts_list(file) else _parse_lines(path, file)
            for number, values in rows:
                if not isinstance(values, dict):
                    what = f"{path}, row {number}"
                    raise InvalidInput(what, got=describe_value(values), do="make every row a JSON object")
                empty = False
                yield JsonRecord(path, number, values)
    except OSError as error:
        raise _unreadable(path, error) from error
    if empty:
        raise InvalidInput(str(path), got="an empty file", do="give a file with at least one row")


def read_record(path: Path) -> JsonRecord:
    """Return the JSON object in a file. Raise InvalidInput if the file cannot be read or is not one JSON object."""
    try:
        with open_regular(path) as file:
            values = _parse(path, file.read(), 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise InvalidInput(str(path), got=describe_value(values), do="make it a JSON object")
    return JsonRecord(path, 1, values)


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), got=error.strerror or str(error), do="give the path of a readable file")


def _starts_list(file: BinaryIO) -> bool:
    start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()  # without the byte order mark
    file.seek(0)
    return start.startswith(b"[")


def _parse_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _parse(path, line, number)


def _parse(path: Path, data: bytes, first_line: int) -> Any:
    line, do = first_line, "fix that line"
    try:
        # Without the line break at the end, so that a row that is cut is reported at its own line.
        value = json.loads(data.rstrip().decode("utf-8-sig"), object_pairs_hook=refuse_duplicates)
        if b"\\u" in data:  # half a character (a lone surrogate) cannot be written or hashed
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        got, do = f"half a character, {error.object[error.start]!a}", "write the whole surrogate pair"
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        got, do = "bytes that are not UTF-8", "save the file as UTF-8"
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        got = f"broken JSON ({error.msg})"
    except RecursionError:
        got = "JSON that is nested too deeply"
    except ValueError as error:  # a key that is given twice, a number with thousands of digits
        got = f"JSON that cannot be read ({error})"
    raise InvalidInput(f"{path}, line {line}", got=got, do=do)


LOCK = ".lock"


class TemporaryFolder:
    """A new folder for the files of this process. If the process is killed, a later process removes the folder."""

    # The process holds a lock on a file in the folder. So a folder without a holder is abandoned, also in a place that
    # machines or containers share, where process ids mean nothing.

    def __init__(self, prefix: str, parent: Path | None = None, name: str = "") -> None:
        """Make a folder in ``parent``, whose name begins with ``prefix``. ``name`` can be one that nobody holds."""
        place = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(prefix, place)
        if name:
            self.path = place / name
            self.path.mkdir(mode=0o700, exist_ok=True)
        else:
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
    file = folder / f"{LOCK}.new"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.rename(folder / LOCK)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


MANIFEST = "manifest.json"

Origin = Mapping[str, str | int]
"""The inputs from which a cached folder is made, such as ``{"conversion": 2, "sha256": "9f86d0.."}``."""


def build_once(folder: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return ``folder``. If it is missing, damaged or of another ``origin``, one process calls ``make`` first."""
    if is_valid(folder, origin):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_valid(folder, origin):  # another process has made the folder
            return folder
        temporary = folder.parent / f".{folder.name}.part"
        shutil.rmtree(temporary, ignore_errors=True)  # files that a killed process has left
        try:
            temporary.mkdir()
            make(temporary)
            manifest = {"origin": dict(origin), "files": _checksums(temporary)}
            with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(manifest, file)
                file.flush()
                os.fsync(file.fileno())
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


def _checksums(folder: Path) -> dict[str, str]:
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums


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
        shutil.rmtree(folder, ignore_errors=True)


DISK = Disk()


@contextmanager
def atomic_dir(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """Yield a hidden temporary folder, which is renamed to ``folder`` at the end of the ``with`` block.

    After an exception in the block, it is removed. A killed process can leave it behind (see
    :func:`remove_leftovers`). Raises OSError if ``folder`` exists and is not empty.
    """
    with _temporary_dir(folder, disk) as temporary:
        yield temporary
        _sync_tree(temporary, disk)
        disk.rename(temporary, folder)
    _sync_parents(folder, disk)


@contextmanager
def atomic_replace_dir(folder: Path, disk: Disk = DISK) -> Iterator[Path]:
    """Yield a hidden temporary folder, which replaces ``folder`` at the end of the ``with`` block, if no exception is
    raised.
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
