"""Arrays and documents as compressed bytes: the one place that knows their layout."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, NamedTuple

LEVEL = 1  # these are short: higher levels cost time and save next to nothing


class Tokens(NamedTuple):
    """The token arrays of one turn. One blob holds all three: compressing starts slowly and runs fast.

    Layout, little-endian, zlib over all: two uint32 with the numbers of new and of action ids, the ids as
    int32, the log-probabilities as float64, so that they come back bit for bit.

    Example:
        >>> Tokens.unpack(Tokens((5, 6), (9, 2), (-0.3, -0.1)).pack())
        Tokens(new_ids=(5, 6), action_ids=(9, 2), logprobs=(-0.3, -0.1))
    """

    new_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def pack(self) -> bytes:
        new, acted = len(self.new_ids), len(self.action_ids)
        layout = f"<2I{new + acted}i{len(self.logprobs)}d"
        return zlib.compress(struct.pack(layout, new, acted, *self.new_ids, *self.action_ids, *self.logprobs), LEVEL)

    @classmethod
    def unpack(cls, blob: bytes) -> Tokens:
        data = zlib.decompress(blob)
        new, acted = COUNTS.unpack_from(data)
        ids = struct.unpack_from(f"<{new + acted}i", data, COUNTS.size)
        start = COUNTS.size + 4 * len(ids)
        return cls(ids[:new], ids[new:], struct.unpack_from(f"<{(len(data) - start) // 8}d", data, start))


COUNTS = struct.Struct("<2I")


def pack_document(document: Any) -> bytes:
    """A JSON value as zlib of its ASCII text; any text survives, lone surrogates included."""
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), LEVEL)


def unpack_document(blob: bytes) -> Any:
    """The inverse of :func:`pack_document`."""
    return json.loads(zlib.decompress(blob))
