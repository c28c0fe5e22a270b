"""Limits on the work of a chat template: the steps, characters and processor time of one render."""

from __future__ import annotations

import re
import time
from typing import Any

from jinja2.exceptions import SecurityError

STEPS, STEPS_PER_CHARACTER = 100_000, 100
"""The largest number of steps of a render: STEPS + STEPS_PER_CHARACTER * characters of the conversation.

A step is an iteration of a loop, a call, an operator or an output. Templates of current models take fewer than 5 steps
per character.
"""

CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 1000
"""The largest number of characters that the operations of a render produce together.

The limit is CHARACTERS + CHARACTERS_PER_CHARACTER * characters of the conversation.
"""

SECONDS = 5.0
"""The largest processor time of a render, in seconds. A render usually takes milliseconds.

Only the processor time of the thread that renders is counted, and not the time of other work on the machine.
"""

MAX_INTEGER_BITS = 4096

_STEPS_PER_CHECK = 50
"""The number of steps between two checks of the processor time."""

_CHARACTERS_PER_NODE = 8
"""The characters that are counted for each value in a container, in addition to its text: quotes, commas, braces."""

_WIDTH = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""Matches four digits (a large width), and an asterisk or a nested brace (a width that comes from an argument)."""


class BudgetExceeded(Exception):
    """Raised if a render of a template needs more steps, characters or time than its budget."""


class Budget:
    """The remaining steps, characters and time of one render, for a conversation of ``size`` characters."""

    def __init__(self, size: int) -> None:
        self.limit_steps = STEPS + STEPS_PER_CHARACTER * size
        self.limit_characters = CHARACTERS + CHARACTERS_PER_CHARACTER * size
        self._steps, self._characters = self.limit_steps, self.limit_characters
        self._end = time.thread_time() + SECONDS
        self._next_check = self._steps - _STEPS_PER_CHECK

    def spend(self, steps: int, characters: int = 0) -> None:
        """Subtract steps and characters from the budget.

        Raises:
            BudgetExceeded: the render has used more steps, characters or time than its budget. Steps and time are
                checked after every ``_STEPS_PER_CHECK`` steps.
        """
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
        """Raise BudgetExceeded if fewer than ``characters`` characters are left. Nothing is subtracted."""
        if characters > self._characters:
            raise BudgetExceeded(f"it could produce {float(characters):.2g} characters at once")

    def nodes_of(self, value: Any) -> int:
        """Return the number of values in a tree of containers.

        A container that occurs at two places of the tree is counted twice. The count stops when it reaches
        ``limit_steps``.
        """
        return _traverse(value, self.limit_steps, characters=0)

    def allow_operation(self, operator: str, left: Any, right: Any) -> None:
        """Spend the cost of an operation with two operands, before the operation runs.

        Raises:
            BudgetExceeded: the cost of the operation is larger than the remaining budget.
            SecurityError: the operation formats a text with a large or computed width.
        """
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
    """Raise BudgetExceeded if the result of ``left operator right`` could be too large an integer.

    An integer is too large if it has more than MAX_INTEGER_BITS bits.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
        if bits.get(operator, 0) > MAX_INTEGER_BITS:
            raise BudgetExceeded("it computes an integer that is too large")


def check_format(text: str) -> None:
    """Raise SecurityError if a format string can have a large or computed width.

    The error is raised for any text with four digits in a row, with an asterisk, or with a brace inside braces.
    """
    if _WIDTH.search(text):
        raise SecurityError("chat templates cannot use large or computed widths in formats")


def size_of(value: Any, limit: int = 2**62) -> int:
    """Return the length of a text. For another value, return the approximate length of its text, at most ``limit``."""
    return len(value) if isinstance(value, str) else min(limit, _traverse(value, limit, _CHARACTERS_PER_NODE))


def _traverse(value: Any, limit: int, characters: int) -> int:
    """Return the number of values in a tree of containers, or the approximate length of the text of the tree.

    If ``characters`` is 0, values are counted. Otherwise, characters are counted: for each value, the length of its
    text plus ``characters``. The count stops when it reaches ``limit``.
    """
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
