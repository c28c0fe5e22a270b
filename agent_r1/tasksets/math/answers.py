r"""Where the answer stands in a text: in ``\boxed{..}``, or behind GSM8K's ``#### ``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]))")
_HASHES = re.compile(r"^#### +(?P<answer>\S.*?)\s*$", re.MULTILINE)
_BRACE = re.compile(r"(?:\\\\)|(?:\\[{}])|(?P<brace>[{}])")


def stated_answer(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{..}``; if there is none, the text after the last ``#### ``;
    else None.

    Strict: a box whose braces do not close, or that is blank, does not count.

    Example:
        >>> stated_answer(r"Either \boxed{2} or \boxed{\frac{1}{2}}."), stated_answer("So 6 * 3 = 18.\n#### 18")
        ('\\frac{1}{2}', '18')
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    hashed = _HASHES.findall(text)
    return hashed[-1] if hashed else None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{..}`` or ``\fbox{..}``; a single character needs no braces.

    Example:
        >>> boxed_answer(r"\boxed{\{1, 2\}}"), boxed_answer(r"\boxed 7"), boxed_answer(r"\boxed{1")
        ('\\{1, 2\\}', '7', None)
    """
    answers = [box["bare"] or _braced(text, box.end()) for box in _BOX.finditer(text)]
    return next((answer.strip() for answer in reversed(answers) if answer is not None and answer.strip()), None)


def _braced(text: str, start: int) -> str | None:
    """Return the text from ``start`` to the brace that closes the one before it; None if none does. Escaped braces
    are text."""
    depth = 1
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found["brace"] or "", 0)
        if depth == 0:
            return text[start : found.start()]
    return None
