"""Detection of stop strings. It runs after every sampled token, so the cheap checks come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

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


class GrowingText:
    """Gives the text of a generation part by part to a check, which is made anew for each generation.

    A few tokens before a part are decoded with it, because the text of a token may depend on them.

    Example:
        GrowingText(decode, lambda: check).check(token_ids)
    """

    def __init__(self, decode: Decode, make_check: Callable[[], Callable[[str], bool]]) -> None:
        self._decode, self._make_check = decode, make_check
        self._check, self._ids, self._count = make_check(), cast(Sequence[int], ()), 0

    def check(self, ids: Sequence[int]) -> bool:
        """Return what the check says about the text of these tokens."""
        continues = ids is self._ids or ids[: self._count] == self._ids[: self._count]
        if not continues or len(ids) < self._count:
            self._check, self._count = self._make_check(), 0
        start = max(0, self._count - _EXTRA_TOKENS)
        before = self._decode(ids[start : self._count]) if self._count else ""
        self._ids, self._count = ids, len(ids)
        return self._check(self._decode(ids[start:])[len(before) :])
