"""The cache of vectors and faiss indexes. The name of a cached folder is a hash of its :class:`Origin`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agent_r1.core.cache import build_once
from agent_r1.core.errors import InvalidInput

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs from which vectors or a faiss index were computed.

    Attributes:
        passages: the checksum of the passages.
        encoder: the fingerprint of the sentence encoder.
        passage_prefix: the text before every passage.
        factory: the factory string of the faiss index; "" for vectors without an index.
    """

    passages: str
    encoder: str
    passage_prefix: str
    factory: str

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)]).encode()).hexdigest()[:32]


def build_vectors(cache: Path, origin: Origin, make: Callable[[Path], None]) -> Path:
    """Return the folder in ``cache`` with the vectors or the faiss index that was computed from ``origin``.

    If the folder is missing or damaged, ``make(folder)`` is called and writes the files.

    Raises InvalidInput if the folder cannot be created.
    """
    try:
        return build_once(cache.expanduser() / origin.key, {"format": FORMAT, **asdict(origin)}, make)
    except OSError as error:
        raise InvalidInput("cache", got=f"{cache}: {error.strerror}", do="name a writable folder") from error
