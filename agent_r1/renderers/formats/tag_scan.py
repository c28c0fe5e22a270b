"""Check whether an action in the format ``tags`` is complete, while its text grows.

The time of all checks together is proportional to the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.renderers.formats.tool_format import THINK_CLOSE, THINK_OPEN

_PARTIAL_FENCE = re.compile(r"```\w*[ \t]*")
"""Matches a Markdown code fence, perhaps with a part of a language name, at the end of the text sampled so far.

Only the text after the fence shows whether the fence opens or closes a block of code.
"""

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ElementPatterns:
    """The patterns that find the opening and the closing delimiter of an element.

    An element is an answer, or a call of one tool. A delimiter is a tag such as ``<search>``, or a Markdown code fence.

    Attributes:
        longest: an upper bound for the length of each delimiter, in characters. If the delimiter is a code fence, the
            spaces after the fence do not count.
        is_answer: true if the element is an answer, false if the element is a call.

    Example:
        ElementPatterns(opening=re.compile("<search>"), closing=re.compile("</search>"), longest=9, is_answer=False)
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    longest: int
    is_answer: bool


class _Search:
    """A search in a growing text: first for the opening delimiter of an element, then for its closing delimiter."""

    def __init__(self, patterns: ElementPatterns) -> None:
        self.patterns, self.start, self.is_closed = patterns, -1, False
        self._position = 0

    def look(self, text: str, begin: int) -> None:
        self._position = max(self._position, begin)
        if self.start < 0 and (opened := self._find(self.patterns.opening, text)):
            self.start, self._position = opened.start(), opened.end()
        if self.start >= 0 and not self.is_closed and self._find(self.patterns.closing, text):
            self.is_closed = True

    def _find(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Return the next match of a pattern in the text so far, or None.

        The next search skips the positions at which no match can begin, whatever text is added later.
        """
        found = pattern.search(text, self._position)
        if found is None:
            fence = text.rfind("```", self._position)
            is_partial = fence >= 0 and _PARTIAL_FENCE.fullmatch(text, fence)
            keep = max(fence - 1, 0) if is_partial else len(text) - self.patterns.longest
            self._position = max(self._position, keep)
        return found


class TagScan:
    """A callable that gets each new part of an action's text, and returns whether the action is complete.

    An action is complete after the closing delimiter of its first call. An action is also complete after the closing
    delimiter of an answer, if no call begins before the answer. A thought is a text ``<think> .. </think>``. Thoughts
    at the beginning of the text are skipped.

    Args:
        elements: the patterns of the calls and the answers.
        is_opened: whether the text begins inside a thought.
        thoughts: the maximum number of thoughts that are skipped.
    """

    def __init__(self, elements: Sequence[ElementPatterns], *, is_opened: bool, thoughts: int) -> None:
        self._searches = [_Search(element) for element in elements]
        self._text, self._begin, self._position = "", 0, 0
        self._is_thinking, self._thoughts = is_opened, thoughts

    def __call__(self, part: str) -> bool:
        self._text += part
        if not self._skip_thoughts():
            return False
        for search in self._searches:
            search.look(self._text, self._begin)
        opened = [search for search in self._searches if search.start >= 0]
        first = min((s for s in opened if not s.patterns.is_answer), key=lambda s: s.start, default=None)
        answers = (s for s in opened if s.patterns.is_answer and s.is_closed)
        return (first is not None and first.is_closed) or any(
            first is None or answer.start < first.start for answer in answers
        )

    def _skip_thoughts(self) -> bool:
        """Skip the thoughts at the beginning of the text. Return whether the search for calls and answers can begin."""
        while self._thoughts:
            if not self._is_thinking:
                self._position = self._end_of_space()
                ahead = self._text[self._position : self._position + len(THINK_OPEN)]
                if THINK_OPEN.startswith(ahead) and ahead != THINK_OPEN:
                    return False  # the text is too short to show whether a thought begins
                if ahead != THINK_OPEN:
                    self._thoughts = 0
                    break
                self._is_thinking = True
            end = self._text.find(THINK_CLOSE, self._position)
            if end < 0:
                self._position = max(self._position, len(self._text) - len(THINK_CLOSE))
                return False
            self._begin = self._position = end + len(THINK_CLOSE)
            self._is_thinking, self._thoughts = False, self._thoughts - 1
        return True

    def _end_of_space(self) -> int:
        found = _SPACE.match(self._text, self._position)
        return found.end() if found else self._position
