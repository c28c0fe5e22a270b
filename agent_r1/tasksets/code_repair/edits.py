"""Edits with which an agent repairs a function.

An edit is a line that replaces the most similar line of the function, or the number of a proposed version of the
function.
"""

from __future__ import annotations

from difflib import SequenceMatcher

SIMILAR = 0.5
"""The minimum similarity (``SequenceMatcher`` ratio, 0 to 1) of a new line and the replaced line.

A new line replaces the most similar line of the function. If the similarity is too small, the edit is invalid.
"""


def replace_line(source: str, index: int, line: str) -> str:
    """Return the source with ``line`` at ``index``, with the indentation of the replaced line.

    Example:
        >>> replace_line("def f(n):\\n    return n", 1, "return -n")
        'def f(n):\\n    return -n'
    """
    lines = source.splitlines()
    indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    lines[index] = indentation + line.strip()
    return "\n".join(lines)


def most_similar_line(source: str, line: str) -> int | None:
    """Return the index of the line in ``source`` that is most similar to ``line``.

    If several lines are equally similar, return the first index. If the similarity is less than ``SIMILAR``, return
    None.
    """
    lines = [old.strip() for old in source.splitlines()]
    ratios = [SequenceMatcher(None, old, line.strip(), autojunk=False).ratio() for old in lines]
    best = max(range(len(lines)), key=ratios.__getitem__)
    return best if ratios[best] >= SIMILAR else None


def apply_edit(source: str, proposals: tuple[str, ...], text: str) -> str | None:
    """Return the source of a function after an edit; None if the edit is invalid or changes nothing.

    With ``proposals`` (versions of the whole function), the edit ``text`` is the number of a proposal, from 1. Without
    proposals, ``text`` is a line, which replaces the most similar line of ``source``.
    """
    text = text.strip()
    if proposals:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
        return proposals[number - 1] if 1 <= number <= len(proposals) else None
    index = most_similar_line(source, text) if text and "\n" not in text else None
    edited = None if index is None else replace_line(source, index, text)
    return None if edited == source else edited
