"""Compression of token arrays and JSON documents. No other module depends on the byte layout."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

LEVEL = 1  # The blobs are short, so higher levels take more time and save almost nothing.


class TurnTokens(NamedTuple):
    """The tokens that a turn adds to the prompt, the sampled tokens, and their log-probabilities.

    The packed blob is compressed by zlib. Its layout is little-endian: the number of new ids and the number of action
    ids as uint32, all ids as int32, and the log-probabilities as float64.

    Example:
        >>> TurnTokens.unpack(TurnTokens((5, 6), (9, 2), (-0.3, -0.1)).pack())
        TurnTokens(new_ids=(5, 6), action_ids=(9, 2), logprobs=(-0.3, -0.1))
    """

    new_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def pack(self) -> bytes:
        new, actions = len(self.new_ids), len(self.action_ids)
        layout = f"<2I{new + actions}i{len(self.logprobs)}d"
        return zlib.compress(struct.pack(layout, new, actions, *self.new_ids, *self.action_ids, *self.logprobs), LEVEL)

    @classmethod
    def unpack(cls, blob: bytes) -> TurnTokens:
        data = zlib.decompress(blob)
        new, actions = _COUNTS.unpack_from(data)
        ids = struct.unpack_from(f"<{new + actions}i", data, _COUNTS.size)
        start = _COUNTS.size + 4 * len(ids)
        return cls(ids[:new], ids[new:], struct.unpack_from(f"<{(len(data) - start) // 8}d", data, start))


_COUNTS = struct.Struct("<2I")


def pack_columns(columns: Sequence[Sequence[float]]) -> bytes:
    """Return columns of equal length as one compressed blob, in which every number is exact, also NaN.

    The layout is little-endian: the number of columns as uint32, then the columns as float64.
    """
    numbers = [number for column in columns for number in column]
    return zlib.compress(struct.pack(f"<I{len(numbers)}d", len(columns), *numbers), LEVEL)


def unpack_columns(blob: bytes) -> tuple[tuple[float, ...], ...]:
    """Return the columns in a result of :func:`pack_columns`. Raise ValueError if their lengths differ."""
    data = zlib.decompress(blob)
    (columns,) = struct.unpack_from("<I", data)
    numbers = struct.unpack_from(f"<{(len(data) - 4) // 8}d", data, 4)
    if not columns or len(numbers) % columns:
        raise ValueError(f"{len(numbers)} numbers are not {columns} columns of equal length")
    length = len(numbers) // columns
    return tuple(numbers[start * length : (start + 1) * length] for start in range(columns))


def pack_document(document: Any) -> bytes:
    """Return a JSON value as compressed ASCII text. Lone surrogates in strings are stored exactly."""
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), LEVEL)


def unpack_document(blob: bytes) -> Any:
    return json.loads(zlib.decompress(blob))
