"""Decode a growing generation part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

MAX_PENDING = 8
"""The largest number of tokens whose text is held back because the last character may be incomplete."""

CHARACTER_TOKENS = 4
"""The largest number of tokens that encode one character: UTF-8 has at most 4 bytes per character."""


class IncrementalDecoder:
    """A decoder that converts the tokens of a generation to text, part by part.

    A part ends only after a complete character, because several tokens can encode one character. Tokens whose text was
    not returned yet are called pending. Invalid bytes are returned as U+FFFD after a few more tokens.

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
        """Add ``ids`` to the pending tokens, and return the text that becomes final.

        - If the last character is complete, no token stays pending. The result is the text of all pending tokens.
        - If the last character is incomplete, and at most ``MAX_PENDING`` tokens are pending, all of these tokens stay
          pending. The result is "".
        - If the last character is incomplete, and more tokens are pending, only the last few stay pending. The result
          is the text of the others.
        """
        self._pending += tuple(ids)
        text = self._text_of(self._pending)
        if text and not text.endswith("\ufffd"):
            return self._advance(len(self._pending), text)
        if len(self._pending) <= MAX_PENDING:
            return ""
        end, text = self._beginning(text)
        return self._advance(end, text)

    def flush(self) -> str:
        """Return the text of the pending tokens. An incomplete character at the end becomes U+FFFD."""
        return self._advance(len(self._pending), self._text_of(self._pending))

    def _beginning(self, text: str) -> tuple[int, str]:
        """Return (n, the text of the first n pending tokens).

        The number n is chosen so that later tokens cannot change the returned text. ``text`` is the text of all pending
        tokens. There must be more than ``MAX_PENDING`` pending tokens.
        """
        count = len(self._pending)
        # Usually only the last character is incomplete, so that one to three tokens remain.
        for end in range(count - 1, count - CHARACTER_TOKENS, -1):
            beginning = self._text_of(self._pending[:end])
            if beginning and not beginning.endswith("\ufffd"):
                return end, beginning
        # Otherwise there are invalid bytes. A character that begins before the last four tokens is complete, so the
        # earlier tokens have their final text, unless they end within such a character. Then ``text`` does not begin
        # with their text.
        ends = [count - CHARACTER_TOKENS - index for index in range(CHARACTER_TOKENS)]
        beginnings = {end: self._text_of(self._pending[:end]) for end in ends}
        end = next((end for end in ends if text.startswith(beginnings[end])), ends[0])
        return end, beginnings[end]

    def _text_of(self, pending: tuple[int, ...]) -> str:
        # the text of a token can depend on the tokens before it, for example if a space at the beginning is dropped
        previous = self._decode(self._previous) if self._previous else ""
        return self._decode(self._previous + pending)[len(previous) :]

    def _advance(self, end: int, text: str) -> str:
        """Remove the pending tokens before the index ``end``. Return ``text``, the text of the removed tokens."""
        if text:  # otherwise decoders that drop a space at the beginning of a text would drop the next space
            self._previous = self._pending[:end]
        self._pending = self._pending[end:]
        return text
