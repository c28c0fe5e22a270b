"""Prepare texts and numbers for people: shorten long texts, and make hidden characters visible.

Models and tools write the texts, so a text can contain anything. This module does not escape HTML, because the
templates of the pages escape HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import regex

from agent_r1.core.trajectory import Rewards, TurnTiming

# U+2800, an empty pattern of Braille, has no property of a character without ink
_HIDDEN = regex.compile(r"[\p{Cc}\p{Cf}\p{Cs}\p{Z}\p{Default_Ignorable_Code_Point}\u2800--[ \n\t]]", regex.VERSION1)
"""Characters that control a terminal, have no ink, reverse the text, or cannot be encoded as UTF-8."""


def visible(text: str) -> str:
    r"""Return a copy of ``text``, in which each hidden character is replaced by its code point.

    Example:
        >>> visible("a\x1b[31m b\u202e c")
        'a⟨U+001B⟩[31m b⟨U+202E⟩ c'
    """
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text.replace("\r\n", "\n"))


def shortened(text: str, most: int) -> str:
    r"""Return a text, cut to the maximum length ``most``. A note at the end gives the number of missing characters.

    Example:
        >>> shortened("abcdef", most=4)
        'abcd\n⟨2 more characters⟩'
    """
    return text if len(text) <= most else f"{text[:most]}\n⟨{len(text) - most:,} more characters⟩"


def one_line(text: object, most: int = 200) -> str:
    r"""Return the text of a value in one line of at most ``most`` characters, with hidden characters made visible.

    Example:
        >>> one_line("first line\nsecond line", most=15)
        'first line sec…'
    """
    line = visible(" ".join(str(text)[: 2 * most].split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def as_json(value: Any) -> str:
    """Return a value as indented JSON. Objects that JSON cannot represent become strings."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (ValueError, RecursionError, TypeError):
        return str(value)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with about ``digits`` significant digits, for people; a dash for None.

    Example:
        >>> [number(value) for value in (0.3828125, 1004.75, 3.4928e-05, 2.0)]
        ['0.3828', '1,005', '3.493e-05', '2']
    """
    if value is None:
        return "\N{EN DASH}"
    value += 0.0  # not -0.0
    if not math.isfinite(value):
        return {"nan": "NaN", "inf": "∞", "-inf": "-∞"}[str(value)]
    size = abs(value)
    if 10**digits <= size < 1e15:
        return f"{value:,.0f}"
    if 1000 <= size < 1e15:
        return f"{value:,.{max(0, digits - 4)}f}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``12 ms``, ``0.8 s``, ``63 s``, ``12 min`` or ``3 h 20 min``."""
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def timing_text(timing: TurnTiming) -> str:
    """Return how long the engine and the environment took in a turn."""
    text = f"engine {duration(timing.engine_seconds)}"
    if timing.first_token_seconds is not None:
        text += f" (first token {duration(timing.first_token_seconds - timing.start_seconds)})"
    return f"{text}, environment {duration(timing.env_seconds)}"


def reward_texts(rewards: Rewards) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each reward, its value as text, and its sign: "plus", "minus", "zero" or "missing"."""
    for name, value in rewards.items():
        values = value if isinstance(value, tuple) else (value,)
        total = sum(one for one in values if one is not None)
        sign = "missing" if value is None else "plus" if total > 0 else "minus" if total < 0 else "zero"
        shown = "not computed" if value is None else ", ".join(map(number, values[:50]))
        yield one_line(name, 100), shown, sign


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys. Each key begins with ``prefix``.

    Example:
        >>> flatten({"steps": 6, "trainer": {"dtype": "float32"}})
        {'steps': 6, 'trainer.dtype': 'float32'}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
