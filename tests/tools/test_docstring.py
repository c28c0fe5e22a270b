"""Parsing of Google-style docstrings."""

from __future__ import annotations

import pytest

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


def test_the_summary_is_the_text_before_the_first_section() -> None:
    assert parse_docstring(FULL)[0] == "Look passages up.\n\nThe search is by words, not by meaning."


def test_arguments_come_from_the_section_args_only() -> None:
    assert parse_docstring(FULL)[1] == {
        "query": "what to look for, in a few words.",
        "k": "how many passages: at most 10.",
        "plain": "Explained on the next line.",
    }


@pytest.mark.parametrize("text", ["", "   ", "Args:\n    a: one."])
def test_without_a_description_the_summary_is_empty(text: str) -> None:
    assert parse_docstring(text)[0] == ""


def test_a_colon_in_the_description_starts_no_section() -> None:
    assert parse_docstring("Usage notes: none.\nArgs: see below")[0] == "Usage notes: none. Args: see below"
