r"""Where the answer stands in a text: in ``\boxed{..}``, or behind GSM8K's ``#### ``."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]))")
_HASHES = re.compile(r"^#### +(\S.*)$", re.MULTILINE)
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
    return str(hashed[-1]).rstrip() if hashed else None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{..}`` or ``\fbox{..}``; a single character needs no braces.

    Example:
        >>> boxed_answer(r"\boxed{\{1, 2\}}"), boxed_answer(r"\boxed 7"), boxed_answer(r"\boxed{1")
        ('\\{1, 2\\}', '7', None)
    """
    closing = _closing_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        # a box without a bare character ends with its brace
        answer = box["bare"] or text[box.end() : closing.get(box.end() - 1, box.end())]
        if answer.strip():
            return answer.strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return the index of the closing brace of each opening brace that is closed. Escaped braces are text.

    One pass over the text: a policy may write any number of boxes that are not closed.
    """
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found["brace"] == "{":
            opened.append(found.start())
        elif found["brace"] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing
