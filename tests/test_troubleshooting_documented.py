"""The messages in docs/troubleshooting.md are those that the code prints."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [line for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
MIN_WORDS = 4
"""Shorter pieces of a message are not searched for: they say too little."""


@cache
def texts_of_the_package() -> str:
    """Return the code with adjacent texts joined, so that the text of a message is in one piece between its values."""
    code = "\n".join(file.read_text("utf-8") for file in sorted((ROOT / "agent_r1").rglob("*.py")))
    return " ".join(re.sub(r'"\s+f?"', "", code).split())


def pieces(message: str) -> list[str]:
    """Return the constant pieces of a message: the texts between values (``..``) and between its parts."""
    split = re.split(r"\.\.|: got |; |, or |: | \(|\)|'", message)
    return [piece.strip(" ,") for piece in split if len(piece.split()) >= MIN_WORDS]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:60])
def test_the_code_has_the_words_of_a_message(message: str) -> None:
    assert [piece for piece in pieces(message) if piece not in texts_of_the_package()] == []


def test_a_message_that_no_code_prints_is_found() -> None:
    assert pieces("device: got cuda; buy a faster machine")[0] not in texts_of_the_package()


def test_most_messages_have_a_piece_that_is_searched_for() -> None:
    assert sum(bool(pieces(message)) for message in MESSAGES) > 0.9 * len(MESSAGES)
