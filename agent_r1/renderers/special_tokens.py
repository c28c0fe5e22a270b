"""A tokenizer's special tokens, and their positions in a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Return (id, text) of each special token."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return [(index, str(token)) for index, token in added.items() if token.special]


def token_at_end(text: str, tokens: Iterable[str]) -> str | None:
    """Return the longest token that a text ends with, ignoring white space after it; None if there is none."""
    return max((token for token in tokens if text.rstrip().endswith(token)), key=len, default=None)


def first_token_in(text: str, tokens: Iterable[str]) -> str | None:
    """Return the token that comes first in a text, the longest if several begin there; None if there is none."""
    found = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return min(found)[2] if found else None
