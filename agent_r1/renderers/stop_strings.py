"""Where an action ends by what it says: asked after every sampled token, so the cheap questions come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

Decode = Callable[[Sequence[int]], str]

SLACK = 4
"""Tokens looked at beyond those that the longest text can have, where some say nothing."""


@dataclass(frozen=True)
class StopStringMatcher:
    """Whether the last of some tokens completes one of ``texts``; what it costs does not grow with the tokens.

    A token has at least a byte, so as many tokens as the longest text has bytes hold all of it.

    Example:
        StopStringMatcher(("</search>",), decode).completes(ids)
    """

    texts: tuple[str, ...]
    decode: Decode
    window: int = field(init=False)
    may: Callable[[int], bool] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        finals = {text[-1] for text in self.texts}
        object.__setattr__(self, "window", SLACK + max(len(text.encode()) for text in self.texts))
        object.__setattr__(self, "may", cache(lambda token: not finals.isdisjoint(self.decode((token,)))))

    def completes(self, ids: Sequence[int]) -> bool:
        if not self.may(ids[-1]):
            return False
        tail = self.decode(ids[-self.window :])
        return any(text in tail for text in self.texts)
