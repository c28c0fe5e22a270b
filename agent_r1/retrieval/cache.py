"""A cache of vectors on disk. The key is a hash of the inputs; the cached files are verified at each use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs that determine a set of vectors or a faiss index. Each origin has its own folder.

    Attributes:
        passages: the checksum of the passages.
        encoder: the fingerprint of the sentence encoder.
        passage_prefix: the text that was put before every passage.
        factory: the factory string of the faiss index; "" for the vectors themselves.

    Example:
        Origin(passages="9f2c..", encoder="77a0..", passage_prefix="", factory="")
    """

    passages: str
    encoder: str
    passage_prefix: str
    factory: str

    @property
    def key(self) -> str:
        """The name of the folder of this origin."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:32]


def build_once(cache: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return the folder for ``origin``. A missing or damaged folder is made with ``make``.

    ``make`` gets a temporary folder and writes the files into this folder. The complete temporary folder is then
    renamed. Raises InvalidInput if no folder can be created in the cache.
    """
    folder = cache.expanduser() / origin.key
    if is_valid(folder, origin):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{origin.key}-", dir=folder.parent))
    except OSError as error:
        raise InvalidInput("cache", got=f"{cache}: {error.strerror}", do="name a writable folder") from error
    try:
        make(temporary)
        _write_manifest(temporary, origin)
        _move_into_place(temporary, folder, origin)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def is_valid(folder: Path, origin: Origin) -> bool:
    """Return whether the folder contains exactly the files that were made for this origin, by their checksums."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest == {"format": FORMAT, "origin": asdict(origin), "files": _files(folder)}
    except (OSError, ValueError):
        return False


def _move_into_place(temporary: Path, folder: Path, origin: Origin) -> None:
    """Rename ``temporary`` to ``folder``; delete a damaged ``folder`` first.

    If the rename fails because another process has made a valid ``folder``, keep the folder of the other process.
    """
    if folder.exists() and not is_valid(folder, origin):
        shutil.rmtree(folder)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not is_valid(folder, origin):
            raise


def _write_manifest(folder: Path, origin: Origin) -> None:
    manifest = {"format": FORMAT, "origin": asdict(origin), "files": _files(folder)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> Mapping[str, str]:
    """Return the sha256 of each file by its name, except of the manifest."""
    checksums = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                checksums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums
