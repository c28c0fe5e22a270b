r"""Find the answer in a text: the content of ``\boxed{..}``, or the text after ``#### `` (GSM8K)."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]))")
_HASHES = re.compile(r"^#### +(\S.*)$", re.MULTILINE)
_BRACE = re.compile(r"(?:\\\\)|(?:\\[{}])|(?P<brace>[{}])")


def stated_answer(text: str) -> str | None:
    r"""Return the answer that a text states; None if there is no answer.

    The answer is the content of the last complete ``\boxed{..}``. If there is no such box, the answer is the text after
    the last ``#### `` at the start of a line. Blank and unclosed boxes are ignored.

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
    r"""Return the content of the last complete ``\boxed{..}`` or ``\fbox{..}``, or None.

    A single character needs no braces. A blank box is ignored.

    Example:
        >>> boxed_answer(r"\boxed{\{1, 2\}}"), boxed_answer(r"\boxed 7"), boxed_answer(r"\boxed{1")
        ('\\{1, 2\\}', '7', None)
    """
    closing = _closing_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        # Without a bare character, the match ends with the opening brace of the box.
        answer = box["bare"] or text[box.end() : closing.get(box.end() - 1, box.end())]
        if answer.strip():
            return answer.strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return a dict {index of an opening brace: index of its closing brace}, such as {2: 4, 0: 5} for "{a{b}}".

    Escaped braces and braces without a partner are left out.
    """
    # One pass: a search for each box would take quadratic time if many boxes are not closed.
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found["brace"] == "{":
            opened.append(found.start())
        elif found["brace"] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing
