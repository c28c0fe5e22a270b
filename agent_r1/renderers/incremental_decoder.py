"""Decoding of a growing generation: each token is decoded a few times, however long the generation becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Decodes the tokens of a generation as they arrive, part by part.

    The text of a token can depend on the tokens before and after it: several tokens can encode one character, and many
    tokenizers drop a space at the beginning of a text. So new tokens are decoded together with the previous part, and
    a part ends only after a complete character. The parts together are the text of all tokens.

    Attributes:
        num_pending: the number of tokens whose text :meth:`add` has not returned yet.

    Example:
        >>> decoder = IncrementalDecoder(lambda ids: bytes(ids).decode(errors="replace"))
        >>> decoder.add((99, 97, 102)), decoder.add((0xC3,)), decoder.add((0xA9,))
        ('caf', '', 'é')
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._previous: tuple[int, ...] = ()
        self._pending: tuple[int, ...] = ()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, ids: Sequence[int]) -> str:
        """Return the text of the pending tokens and the new tokens ``ids``.

        If this text ends within a character, return "". The tokens are then pending.
        """
        self._pending += tuple(ids)
        text = self._pending_text()
        return "" if not text or text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        """Return the text of the pending tokens, also if it ends within a character."""
        return self._advance(self._pending_text())

    def _pending_text(self) -> str:
        previous = self._decode(self._previous) if self._previous else ""
        return self._decode(self._previous + self._pending)[len(previous) :]

    def _advance(self, text: str) -> str:
        self._previous, self._pending = self._pending, ()
        return text
