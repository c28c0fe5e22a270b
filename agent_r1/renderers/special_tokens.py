"""A tokenizer's special tokens, and where they stand in a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Each with its number."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return [(index, str(token)) for index, token in added.items() if token.special]


def last_of(text: str, tokens: Iterable[str]) -> str | None:
    """The token that a text ends with, whatever space follows it."""
    return max((token for token in tokens if text.rstrip().endswith(token)), key=len, default=None)


def first_of(text: str, tokens: Iterable[str]) -> str | None:
    """The token that stands first in a text."""
    found = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return min(found)[2] if found else None
