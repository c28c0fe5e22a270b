"""Detection of stop strings, after every sampled token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

from agent_r1.core.inference import StopCondition

Decode = Callable[[Sequence[int]], str]

_EXTRA_TOKENS = 4
"""The number of earlier tokens that are decoded together with new tokens.

The text of a token can depend on the tokens before it, for example if several tokens encode one character.
"""


class StopStringMatcher:
    """A matcher that checks whether the last token of a generation completes one of ``strings``.

    Only the last few tokens are decoded, so the cost of a check does not grow with the length of the generation.
    """

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        self.window = _EXTRA_TOKENS + max(len(string.encode()) for string in strings)
        last_characters = {string[-1] for string in strings}
        self._strings, self._decode = strings, decode
        self._can_complete = cache(lambda token: not last_characters.isdisjoint(decode((token,))))

    def matches(self, ids: Sequence[int]) -> bool:
        if not self._can_complete(ids[-1]):
            return False
        text = self._decode(ids[-self.window :])
        return any(string in text for string in self._strings)


def with_stop_strings(condition: StopCondition | None, strings: tuple[str, ...], decode: Decode) -> StopCondition:
    """Return a stop condition that is met if ``condition`` is met, or if the text contains one of ``strings``.

    ``strings`` must not be empty. A string inside a thought (``<think> .. </think>``) also meets the condition.
    """
    matcher = StopStringMatcher(strings, decode)
    if condition is None:
        return StopCondition(strings, matcher.matches)
    is_met = condition.is_met
    return StopCondition((*condition.strings, *strings), lambda ids: matcher.matches(ids) or is_met(ids))


class GrowingText:
    """A checker that decodes new tokens of a generation, and passes their text to a function.

    Args:
        decode: returns the text of tokens.
        make_check: is called at the beginning of each generation, and returns the function for this generation. The
            function gets each new part of the text, and returns whether the generation may end.
    """

    def __init__(self, decode: Decode, make_check: Callable[[], Callable[[str], bool]]) -> None:
        self._decode, self._make_check = decode, make_check
        self._check, self._ids, self._count = make_check(), cast(Sequence[int], ()), 0

    def check(self, ids: Sequence[int]) -> bool:
        """Return whether a generation may end after the tokens ``ids``.

        ``ids`` are all tokens of the generation so far. Only the text of tokens that were added since the previous call
        is checked. If ``ids`` do not begin with the tokens of the previous call, a new generation has begun.
        """
        continues = ids is self._ids or ids[: self._count] == self._ids[: self._count]
        if not continues or len(ids) < self._count:
            self._check, self._count = self._make_check(), 0
        start = max(0, self._count - _EXTRA_TOKENS)
        before = self._decode(ids[start : self._count]) if self._count else ""
        self._ids, self._count = ids, len(ids)
        return self._check(self._decode(ids[start:])[len(before) :])
