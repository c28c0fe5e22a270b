"""Manifests and digests: sha256 hashes of saved files and of the rows of ``run.db``, so that later changes are found.

The file ``manifest.json`` of a saved folder:

{"format": 6, "model": "9f86..", "tokenizer": "60ba..", "template": "2c26..", "weights": "fcde..",
 "rows": {"sha256": "81ce..", "tables": {"meta": {"rows": 3, "sha256": "b94d.."}, ..}},
 "files": {"model.safetensors": {"size": 843008, "sha256": "d7a8.."}}}

The entries "model" to "weights" are the fields of a :class:`ModelFingerprint`. "rows" is a :class:`RowsDigest`. The
file ``digest.json`` of a run that was closed is a :class:`RowsDigest` too.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.files import DISK, Disk, atomic_write
from agent_r1.store.schema import TABLE_NAMES, connect_reader

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 6

# The digest of all rows of a run that no process writes. Opening a run for writing removes the file.
DIGEST_FILE = "digest.json"

MODEL, CHECKPOINTS, STEP = "model", "checkpoints", "step-"


class CorruptCheckpoint(AgentR1Error):
    """Raised if a saved model or checkpoint is damaged. The message names the problem in one line."""


@dataclass(frozen=True, slots=True)
class TableDigest:
    """The number of rows of a table, and the sha256 of these rows in the order of their ids."""

    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """The digests of all tables of a run database at one time. Rows that are added later do not change it."""

    tables: Mapping[str, TableDigest]

    @property
    def sha256(self) -> str:
        """The sha256 over the digests of all tables."""
        lines = (f"{name} {table.rows} {table.sha256}\n" for name, table in self.tables.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables.values())

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowsDigest:
        """Return the digest that :meth:`to_json` converted. Raises ValueError, KeyError or TypeError for other data."""
        tables = {name: data["tables"][name] for name in TABLE_NAMES}
        digest = cls({name: TableDigest(int(one["rows"]), str(one["sha256"])) for name, one in tables.items()})
        if digest.sha256 != data["sha256"]:
            raise ValueError("its sha256 is not that of its tables")
        return digest


def digest_rows(connection: sqlite3.Connection, first: Mapping[str, TableDigest] | None = None) -> RowsDigest:
    """Return the digest of all rows of a run database, or only of as many rows of each table as ``first`` names."""
    tables = {}
    for table in TABLE_NAMES:
        limit = -1 if first is None else first[table].rows
        count, digest = 0, hashlib.sha256()
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY id LIMIT ?", (limit,)):
            digest.update(_encode_row(row))
            count += 1
        tables[table] = TableDigest(count, digest.hexdigest())
    return RowsDigest(tables)


def _encode_row(row: Sequence[Any]) -> bytes:
    # The lengths of blobs are in the first line, so no two rows have the same bytes. ascii() writes a float exactly.
    blobs = [value for value in row if isinstance(value, bytes)]
    values = [("blob", len(value)) if isinstance(value, bytes) else value for value in row]
    return b"".join([ascii(values).encode(), b"\n", *blobs])


def read_digest(database: Path) -> RowsDigest | None:
    """Return the digest of all rows of a run database; None if the file ``database`` does not exist."""
    if not database.exists():
        return None
    with closing(connect_reader(database)) as connection:
        return digest_rows(connection)


def changed_tables(connection: sqlite3.Connection, recorded: RowsDigest) -> list[str]:
    """Return one line for each table whose first rows are not the rows that were recorded."""
    lines = []
    found = digest_rows(connection, recorded.tables)
    for name, before in recorded.tables.items():
        now = found.tables[name]
        if now.rows < before.rows:
            lines.append(f"table {name} has {now.rows} of {before.rows} recorded rows")
        elif now != before:
            lines.append(f"table {name} differs from its {before.rows} recorded rows")
    return lines


def added_rows(connection: sqlite3.Connection, recorded: RowsDigest) -> list[str]:
    """Return one line for each table that has more rows than were recorded."""
    counts = ((name, connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]) for name in TABLE_NAMES)
    more = {name: count - recorded.tables[name].rows for name, count in counts}
    return [f"table {name} has {count} rows more than were recorded" for name, count in more.items() if count > 0]


def write_digest_file(folder: Path, connection: sqlite3.Connection) -> None:
    """Write ``digest.json`` to the folder of a run. Raises OSError if this is impossible."""
    text = json.dumps(digest_rows(connection).to_json(), indent=2)
    atomic_write(folder / DIGEST_FILE, text.encode("ascii"))


def read_digest_file(folder: Path) -> bytes | None:
    try:
        return (folder / DIGEST_FILE).read_bytes()
    except FileNotFoundError:
        return None


def check_closed(connection: sqlite3.Connection, content: bytes) -> list[str]:
    """Return one line for each table that is not as it was when ``digest.json``, with this content, was written."""
    try:
        recorded = RowsDigest.from_json(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        return [f"{DIGEST_FILE} cannot be read: {type(error).__name__}: {error}"]
    try:
        return changed_tables(connection, recorded) or added_rows(connection, recorded)
    except sqlite3.Error as error:
        return [str(error)]


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The sha256 hashes that identify a saved model."""

    model: str  # the hash of the configuration, and of the names, shapes and types of the parameters
    tokenizer: str  # the hash of the rules by which the tokenizer splits text
    template: str  # the hash of the chat template
    weights: str  # the checksum of the weights


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of the manifest of a saved folder.

    ``rows`` is the digest of all rows that the run had when the folder was saved; None if the folder belongs to no run.
    """

    fingerprint: ModelFingerprint
    rows: RowsDigest | None
    files: Mapping[str, FileEntry]


def write_manifest(folder: Path, fingerprint: ModelFingerprint, rows: RowsDigest | None, disk: Disk = DISK) -> None:
    """Write the manifest of the files that are in a folder now."""
    files = {path.relative_to(folder).as_posix(): asdict(_hash_entry(path)) for path in sorted(_list_files(folder))}
    digest = None if rows is None else rows.to_json()
    text = json.dumps({"format": MANIFEST_FORMAT, **asdict(fingerprint), "rows": digest, "files": files}, indent=2)
    disk.write(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        CorruptCheckpoint: the manifest cannot be read.
        InvalidInput: this version of agent-r1 does not read the manifest's format.
    """
    try:
        data: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = data.pop("format")
        if found != MANIFEST_FORMAT:
            age = "newer" if found > MANIFEST_FORMAT else "older"
            do = f"use the agent-r1 that wrote it; this one reads format {MANIFEST_FORMAT}"
            raise InvalidInput("saved folder", got=f"{folder} of format {found}, which is {age}", do=do)
        files = {name: FileEntry(**entry) for name, entry in data.pop("files").items()}
        rows = data.pop("rows")
        return Manifest(ModelFingerprint(**data), None if rows is None else RowsDigest.from_json(rows), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{folder} has no readable manifest: {type(error).__name__}: {error}") from error


def check_manifest(folder: Path) -> Manifest:
    """Compare every file of a folder with the manifest, and return the manifest.

    Raises:
        CorruptCheckpoint: a file is missing, additional or changed, or the manifest cannot be read.
        InvalidInput: this version of agent-r1 does not read the manifest's format.
    """
    manifest = read_manifest(folder)
    try:
        found = {path.relative_to(folder).as_posix() for path in _list_files(folder)}
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be listed: {error}") from error
    for name in sorted(manifest.files.keys() - found):
        raise CorruptCheckpoint(f"{folder} lacks {name}")
    for name in sorted(found - manifest.files.keys()):
        raise CorruptCheckpoint(f"{folder} holds {name}, which is not in its manifest")
    for name, entry in manifest.files.items():
        try:
            changed = _hash_entry(folder / name) != entry
        except OSError as error:
            raise CorruptCheckpoint(f"{folder} holds a {name} that cannot be read: {error}") from error
        if changed:
            raise CorruptCheckpoint(f"{folder} holds a {name} that has changed")
    return manifest


def sizes_match(folder: Path) -> bool:
    """Return whether all files in the manifest exist and have the recorded sizes. Return False without a manifest."""
    try:
        entries = read_manifest(folder).files.items()
        return all((folder / name).stat().st_size == entry.size for name, entry in entries)
    except (AgentR1Error, OSError):
        return False


def list_checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, newest first. The checkpoints are not checked."""
    folders = [path for path in (run / CHECKPOINTS).glob(f"{STEP}*") if path.name.removeprefix(STEP).isdecimal()]
    return sorted(folders, key=checkpoint_step, reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps that were taken before a checkpoint was saved."""
    return int(checkpoint.name.removeprefix(STEP))


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return (path for path in found if not path.name.startswith("."))


def _hash_entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, hash_file(path))
