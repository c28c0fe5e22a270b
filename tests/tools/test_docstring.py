"""Parsing of Google-style docstrings."""

from __future__ import annotations

from agent_r1.tools.function_tool import parse_docstring

FULL = """Look passages up.

    The search is by words,
    not by meaning.

    Args:
        query: what to look for,
            in a few words.
        k (int): how many passages: at most 10.
        plain:
            Explained on the next line.

    Returns:
        text: the passages.

    Example:
        search("x")
    """


def test_the_summary_and_the_arguments_are_found() -> None:
    summary, arguments = parse_docstring(FULL)
    assert summary == "Look passages up.\n\nThe search is by words, not by meaning."
    assert arguments == {
        "query": "what to look for, in a few words.",
        "k": "how many passages: at most 10.",
        "plain": "Explained on the next line.",
    }


def test_other_texts() -> None:
    assert parse_docstring("   ") == ("", {}) and parse_docstring("Args:\n    a: one.")[0] == ""
    assert parse_docstring("Usage notes: none.\nArgs: see below") == ("Usage notes: none. Args: see below", {})
