"""Vectors on the disk, by what they were made from: made once, checked whenever they are used again."""

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
    """All that decides what vectors are: another origin is another folder.

    Example:
        Origin(passages="9f2c..", encoder="77a0..", passage_prefix="", factory="")
    """

    passages: str
    encoder: str
    passage_prefix: str
    factory: str

    @property
    def key(self) -> str:
        """A name for a folder."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:32]


def made_once(cache: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """The folder of what ``make`` writes for ``origin``; it is called where there is none yet, or one that is damaged.

    ``make`` fills a temporary folder, which gets its name when it is complete and on the disk. Raises InvalidInput
    where the cache cannot be written.
    """
    folder = cache.expanduser() / origin.key
    if is_sound(folder, origin):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{origin.key}-", dir=folder.parent))
    except OSError as error:
        raise InvalidInput("cache", got=f"{cache}: {error.strerror}", do="name a folder to write to") from error
    try:
        make(temporary)
        _write_manifest(temporary, origin)
        _take_place(temporary, folder, origin)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def is_sound(folder: Path, origin: Origin) -> bool:
    """Whether the folder holds, bit for bit, what was made for this origin."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return manifest == {"format": FORMAT, "origin": asdict(origin), "files": _files(folder)}
    except (OSError, ValueError):
        return False


def _take_place(temporary: Path, folder: Path, origin: Origin) -> None:
    """Where another process was faster, and its work is sound, that is kept."""
    if folder.exists() and not is_sound(folder, origin):
        shutil.rmtree(folder)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not is_sound(folder, origin):
            raise


def _write_manifest(folder: Path, origin: Origin) -> None:
    manifest = {"format": FORMAT, "origin": asdict(origin), "files": _files(folder)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> Mapping[str, str]:
    """sha256 of each file but the manifest."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
