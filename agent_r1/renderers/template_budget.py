"""How much a chat template may compute: steps, characters and processor time of one render."""

from __future__ import annotations

import re
import time
from typing import Any

from jinja2.exceptions import SecurityError

STEPS, STEPS_PER_CHARACTER = 100_000, 100
"""Steps that a render may take, and further ones for each character of the conversation. A step is an iteration of a
loop, a call, an operator or an output; templates of current models take fewer than 5 per character."""

CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 1000
"""Characters that a render may produce in all, and further ones for each character of the conversation."""

SECONDS = 5.0
"""Processor time of a render, which usually takes milliseconds. Work that others give to the machine does not count."""

MAX_INTEGER_BITS = 4096

_STEPS_PER_CHECK = 50
"""Steps between two looks at the clock."""

_CHARACTERS_PER_NODE = 8
"""Characters that a value in a list counts beside its text: quotes, commas, braces."""

_WIDTH = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""Widths in format strings that are large, or come from an argument."""


class BudgetExceeded(Exception):
    """A template computes too much."""


class Budget:
    """What is left of the steps, characters and time of one render, for a conversation of ``size`` characters."""

    def __init__(self, size: int) -> None:
        self.limit_steps = STEPS + STEPS_PER_CHARACTER * size
        self.limit_characters = CHARACTERS + CHARACTERS_PER_CHARACTER * size
        self._steps, self._characters = self.limit_steps, self.limit_characters
        self._end = time.thread_time() + SECONDS
        self._next_check = self._steps - _STEPS_PER_CHECK

    def spend(self, steps: int, characters: int = 0) -> None:
        """Raise BudgetExceeded if there are not so many steps and characters left."""
        self._steps -= steps
        self._characters -= characters
        if self._characters < 0:
            raise BudgetExceeded(f"it produces more than {self.limit_characters} characters")
        if self._steps <= self._next_check:
            self._check()

    def _check(self) -> None:
        self._next_check = max(-1, self._steps - _STEPS_PER_CHECK)
        if self._steps < 0:
            raise BudgetExceeded(f"it takes more than {self.limit_steps} steps")
        if time.thread_time() > self._end:
            raise BudgetExceeded(f"it takes more than {SECONDS:g} s")

    def require(self, characters: int) -> None:
        """Raise BudgetExceeded if an operation could produce more characters than are left."""
        if characters > self._characters:
            raise BudgetExceeded(f"it could produce {float(characters):.2g} characters at once")

    def nodes_of(self, value: Any) -> int:
        """Return how many values a container holds, counting a part that occurs twice twice."""
        return _traverse(value, self.limit_steps, characters=0)

    def allow_operation(self, operator: str, left: Any, right: Any) -> None:
        """Raise BudgetExceeded if the operation produces too much, before it runs."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            self.spend(1)
            _require_small(operator, left, right)
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self.require(len(sequence) * max(times, 0))
                    self.spend(1 + self.nodes_of(sequence) * max(times, 0) * (not isinstance(sequence, str)))
                    self.spend(0, len(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            self.spend(1, size_of([left, right], self.limit_characters) * max(1, left.count("%")))
        elif isinstance(left, str):
            self.spend(1, len(left) + (len(right) if isinstance(right, str) else 0))
        else:
            self.spend(1 + self.nodes_of(left) + self.nodes_of(right))


def _require_small(operator: str, left: float, right: float) -> None:
    """Raise BudgetExceeded if the result is an integer with too many digits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > MAX_INTEGER_BITS:
            raise BudgetExceeded("it computes an integer that is too large")


def check_format(text: str) -> None:
    """Raise SecurityError if a format string has large widths, or takes them from its arguments."""
    if _WIDTH.search(text):
        raise SecurityError("chat templates cannot use large or computed widths in formats")


def size_of(value: Any, limit: int = 2**62) -> int:
    """Return about how many characters writing out a value takes, or ``limit`` if it takes at least as many."""
    return len(value) if isinstance(value, str) else min(limit, _traverse(value, limit, _CHARACTERS_PER_NODE))


def _traverse(value: Any, limit: int, characters: int) -> int:
    """Return the number of values in a tree of containers, or their characters, or something above ``limit``."""
    total, waiting = 0, [value]
    while waiting and total < limit:
        item = waiting.pop()
        total += characters or 1
        if isinstance(item, str):
            total += len(item) * bool(characters)
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif isinstance(item, int) and characters:
            total += item.bit_length() // 3
    return total
