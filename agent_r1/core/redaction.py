"""Remove credentials from text before it is stored or shown."""

from __future__ import annotations

import re

REDACTED = "***"
"""Stands in the place of credentials."""

# One slash is enough: a Path makes "http:/user:password@host" of an address.
_URL = re.compile(r"\b(?P<scheme>[a-z][a-z0-9+.-]*:/{1,2})(?P<rest>[^\s'\"<>]+)", re.IGNORECASE)
_PARAMETER = re.compile(r"(?<=[?&])([^=&#]+)=[^&#]+")


def redact(text: str) -> str:
    """Return a text in which the addresses have no user, no password, and no values of query parameters.

    Example:
        >>> redact("no answer from http://ann:secret@10.0.0.1:8800/search?token=abc")
        'no answer from http://***@10.0.0.1:8800/search?token=***'
    """
    return _URL.sub(_redact_url, text) if ":/" in text else text


def has_redacted(text: str) -> bool:
    """Return whether a text is an address whose credentials were removed."""
    return redact(text) == text and REDACTED in text and _URL.search(text) is not None


def _redact_url(match: re.Match[str]) -> str:
    rest = match["rest"]
    if "@" in rest:
        rest = f"{REDACTED}@{rest.rpartition('@')[2]}"  # a password may contain an unescaped @ or /
    return match["scheme"] + _PARAMETER.sub(rf"\1={REDACTED}", rest)
