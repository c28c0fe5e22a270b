"""Suggestions for names that do not exist."""

from __future__ import annotations

import pytest

from agent_r1.core.errors import suggest


@pytest.mark.parametrize(
    ("name", "known", "closest"),
    [
        ("trian", ["train", "eval"], "train"),
        ("hgih", ["loss.high", "seed"], "loss.high"),
        ("clip_high", ["advantage", "loss.high"], "loss.high"),
        ("lr", ["seed", "optimizer.learning_rate"], "optimizer.learning_rate"),
        ("learning_rate", ["steps", "optimizer.learning_rate"], "optimizer.learning_rate"),
    ],
)
def test_a_similar_name_is_suggested(name: str, known: list[str], closest: str) -> None:
    assert suggest(name, known) == f"did you mean {closest!r}?"


@pytest.mark.parametrize(("name", "known"), [("zzz", ["search", "add"]), ("search", []), ("", ["add"])])
def test_nothing_is_suggested_if_no_name_is_similar(name: str, known: list[str]) -> None:
    assert suggest(name, known) == ""


def test_a_single_letter_is_not_taken_for_the_initial_of_a_one_word_name() -> None:
    assert suggest("s", ["search"]) == ""
