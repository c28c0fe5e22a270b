"""Detection of stop strings. It runs after every sampled token, so the cheap checks come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

Decode = Callable[[Sequence[int]], str]

_EXTRA_TOKENS = 4
"""Tokens to decode beyond those that the longest string can have, because some tokens decode to no text."""


class StopStringMatcher:
    """Checks whether the last of some tokens completes one of ``strings``. Its cost does not grow with the tokens.

    A token has at least one byte, so the longest string has at most as many tokens as bytes.

    Example:
        StopStringMatcher(("</search>",), decode).matches(token_ids)
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self.window = _EXTRA_TOKENS + max(len(string.encode()) for string in strings)
        last_characters = {string[-1] for string in strings}
        self._strings, self._decode = strings, decode
        self._can_complete = cache(lambda token: not last_characters.isdisjoint(decode((token,))))

    def matches(self, ids: Sequence[int]) -> bool:
        """Return whether a stop string is complete and the last token may have completed it."""
        if not self._can_complete(ids[-1]):
            return False
        text = self._decode(ids[-self.window :])
        return any(string in text for string in self._strings)
