"""Limits on the work of a chat template: the steps, characters and processor time of one render."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

STEPS, STEPS_PER_CHARACTER = 100_000, 100
"""One render of a chat template may take at most STEPS steps, plus STEPS_PER_CHARACTER steps for each character of the
conversation.

A step is a call, an operator, an output, or one iteration of a loop. A call or an operator takes more steps if a value
is long.
"""

CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 1000
"""One render may produce at most CHARACTERS characters, plus CHARACTERS_PER_CHARACTER characters for each character of
the conversation."""

SECONDS = 5.0
"""The limit on the processor time of the rendering thread in one render, in seconds. A render usually takes
milliseconds."""

MAX_INTEGER_BITS = 2**14
"""The limit on the number of bits of an integer that a template computes.

Integers from JSON always have fewer bits, because Python's JSON parser accepts at most 4300 digits.
"""

_STEPS_PER_CHECK, _CHARACTERS_PER_CHECK = 50, 100_000
"""How often a :class:`Budget` checks the time: every _STEPS_PER_CHECK steps, and for large outputs.

An output is large if it has at least _CHARACTERS_PER_CHECK characters.
"""

_CHARACTERS_PER_NODE = 8
"""The number of characters that :func:`size_of` adds per value in a container, for quotes, commas and braces."""

_MAX_WIDTH_DIGITS = 3

_CONVERSION = re.compile(
    r"%(?:\([^()]*\))?"  # the name of an argument
    r"[#0\- +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<type>.?)",
    re.DOTALL,
)
"""A regular expression for one placeholder in a format string of the operator ``%``.

Examples of placeholders are ``%s``, ``%5d``, ``%(name).2f`` and ``%%``.
"""


_COLLECTIONS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
"""Types of containers whose iterators yield all values in the container. Dictionaries and namespaces are left out: an
iterator over a dictionary yields only the keys, and a namespace has no iterator."""


class BudgetExceeded(Exception):
    """Raised if a render of a template needs more steps, characters or time than its budget allows."""


class Budget:
    """The work that one render of a chat template may still do: steps, characters, and seconds of processor time.

    To *spend* a cost is to subtract it from the budget. ``size`` is the number of characters of the conversation.
    """

    def __init__(self, size: int) -> None:
        self.limit_steps = STEPS + STEPS_PER_CHARACTER * size
        self.limit_characters = CHARACTERS + CHARACTERS_PER_CHARACTER * size
        self._steps, self._characters = self.limit_steps, self.limit_characters
        self._end = time.thread_time() + SECONDS
        self._next_check = self._steps - _STEPS_PER_CHECK

    def spend(self, steps: int, characters: int = 0) -> None:
        """Subtract steps and characters from the budget.

        The limit on characters is checked in every call. The limits on steps and time are checked only every few calls.

        Raises:
            BudgetExceeded: the render has used more steps, characters or time than its budget allows.
        """
        self._steps -= steps
        self._characters -= characters
        if self._characters < 0:
            raise BudgetExceeded(f"it produces more than {self.limit_characters} characters")
        if self._steps <= self._next_check or characters >= _CHARACTERS_PER_CHECK:
            self._next_check = max(-1, self._steps - _STEPS_PER_CHECK)
            if self._steps < 0:
                raise BudgetExceeded(f"it takes more than {self.limit_steps} steps")
            if time.thread_time() > self._end:
                raise BudgetExceeded(f"it takes more than {SECONDS:g} s")

    def require(self, characters: int) -> None:
        if characters > self._characters:
            raise BudgetExceeded(f"it could produce {float(characters):.2g} characters at once")

    def require_small(self, *integers: int) -> None:
        if max(integer.bit_length() for integer in integers) > MAX_INTEGER_BITS:
            raise BudgetExceeded("it computes an integer that is too large")

    def nodes_of(self, value: Any) -> int:
        """Return 1 plus the number of elements of ``value`` and of all containers inside ``value``."""
        return _traverse(value, self.limit_steps, characters=0)

    def allow_operation(self, operator: str, left: Any, right: Any) -> None:
        """Subtract the cost of an operation with two operands from the budget, before the operation runs.

        Raises:
            BudgetExceeded: the cost of the operation is larger than the remaining budget.
            SecurityError: the operation is ``%``, and its format string has a large or computed width.
        """
        if isinstance(left, int | float) and isinstance(right, int | float):
            self.spend(1)
            if isinstance(left, int) and isinstance(right, int):
                self.require_small(left, right)
                bits = {"**": left.bit_length() * max(right, 0), "*": left.bit_length() + right.bit_length()}
                if bits.get(operator, 0) > MAX_INTEGER_BITS:
                    raise BudgetExceeded("it computes an integer that is too large")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self.require(len(sequence) * max(times, 0))
                    self.spend(1 + self.nodes_of(sequence) * max(times, 0) * (not isinstance(sequence, str)))
                    self.spend(0, len(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_percent_format(left)
            self.spend(1, size_of([left, right], self.limit_characters) * max(1, left.count("%")))
        elif isinstance(left, str):
            self.spend(1, len(left) + (len(right) if isinstance(right, str) else 0))
        else:
            self.spend(1 + self.nodes_of(left) + self.nodes_of(right))


def check_percent_format(text: str) -> None:
    """Raise SecurityError if a format such as ``"%5.2f"`` is not allowed.

    The width (5 in the example) and the precision (2) must be small numbers. ``"%999999999d"`` is not allowed, and
    neither is ``"%*d"``, which takes the width from an argument.
    """
    for conversion in _CONVERSION.finditer(text):
        if conversion["type"] == "(":
            raise SecurityError("chat templates cannot use parentheses in the names of formats")
        _check_width(conversion["width"])
        _check_width(conversion["precision"] or "")


def check_format_spec(spec: str) -> None:
    """Raise SecurityError for a large width or precision in a format specification of ``str.format``."""
    for digits in re.findall(r"\d+", spec):
        _check_width(digits)


def _check_width(width: str) -> None:
    if width == "*" or len(width.lstrip("0")) > _MAX_WIDTH_DIGITS:
        raise SecurityError("chat templates cannot use large or computed widths in formats")


def size_of(value: Any, limit: int = 2**62) -> int:
    """Return the number of characters that a value has as text."""
    return len(value) if isinstance(value, str) else min(limit, _traverse(value, limit, _CHARACTERS_PER_NODE))


def _traverse(value: Any, limit: int, characters: int) -> int:
    # The estimate adds ``characters`` for ``value`` and for each element, because of quotes and commas.
    total, waiting = 0, [value]
    while waiting and total < limit:
        item = waiting.pop()
        total += characters or 1
        if isinstance(item, str):
            total += len(item) * bool(characters)
        elif isinstance(item, dict | MappingProxyType):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, _COLLECTIONS):
            waiting.extend(item)
        elif isinstance(item, Namespace):
            waiting.extend(item._Namespace__attrs.values())  # jinja2 offers no list of the values
        elif isinstance(item, int) and characters:
            total += item.bit_length() // 3
    return total
