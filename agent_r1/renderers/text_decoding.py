"""Decode a growing generation part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

from agent_r1.core.inference import StopCondition

Decode = Callable[[Sequence[int]], str]

MAX_PENDING = 8
"""The largest number of tokens whose text is held back because the last character may be incomplete."""

CHARACTER_TOKENS = 4
"""The largest number of tokens that encode one character: UTF-8 has at most 4 bytes per character."""


class IncrementalDecoder:
    """A decoder that converts the tokens of a generation to text, part by part.

    A part ends only after a complete character, because several tokens can encode one character. Invalid bytes are
    returned as U+FFFD after a few more tokens.

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
        """Return the text that becomes final with the new tokens; "" while the last character is incomplete."""
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
        # More than MAX_PENDING tokens are pending: return the length and the text of those that later tokens cannot
        # change.
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
        if text:  # otherwise decoders that drop a space at the beginning of a text would drop the next space
            self._previous = self._pending[:end]
        self._pending = self._pending[end:]
        return text


_EXTRA_TOKENS = 4  # earlier tokens that are decoded together with new ones, because they can share a character


class StopStringMatcher:
    """A matcher that checks whether the last token of a generation completes one of ``strings``."""

    def __init__(self, strings: tuple[str, ...], decode: Decode) -> None:
        # only so many tokens are decoded, so that the cost of a check does not grow with the length of the generation
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
        make_check: returns the function for one generation. The function gets each new part of the text, and returns
            whether the generation may end.
    """

    def __init__(self, decode: Decode, make_check: Callable[[], Callable[[str], bool]]) -> None:
        self._decode, self._make_check = decode, make_check
        self._check, self._ids, self._count = make_check(), cast(Sequence[int], ()), 0

    def check(self, ids: Sequence[int]) -> bool:
        """Return whether a generation may end after ``ids``, which are all its tokens so far."""
        # if the tokens do not begin with those of the previous call, a new generation has begun
        continues = ids is self._ids or ids[: self._count] == self._ids[: self._count]
        if not continues or len(ids) < self._count:
            self._check, self._count = self._make_check(), 0
        start = max(0, self._count - _EXTRA_TOKENS)
        before = self._decode(ids[start : self._count]) if self._count else ""
        self._ids, self._count = ids, len(ids)
        return self._check(self._decode(ids[start:])[len(before) :])
