"""Remove credentials from text before it is stored or shown."""

from __future__ import annotations

import re

REDACTED = "***"
"""The text that replaces credentials."""

# For http(s), one slash is enough, because Path changes "http://user:password@host" to "http:/user:password@host".
_URL = re.compile(r"\b(?P<scheme>https?:/{1,2}|[a-z][a-z0-9+.-]*://)(?P<rest>[^\s'\"<>]+)", re.IGNORECASE)
_PARAMETER = re.compile(r"(?<=[?&])([^=&#]+)=[^&#]+")


def redact(text: str) -> str:
    """Return a text with the user, the password and the query values of each address replaced by ``***``.

    Example:
        >>> redact("no answer from http://ann:secret@10.0.0.1:8800/search?token=abc")
        'no answer from http://***@10.0.0.1:8800/search?token=***'
    """
    return _URL.sub(_redact_url, text) if ":/" in text else text


def has_redacted(text: str) -> bool:
    """Return whether credentials were replaced in the addresses of a text, and no address still has credentials."""
    return redact(text) == text and REDACTED in text and _URL.search(text) is not None


def _redact_url(match: re.Match[str]) -> str:
    rest = match["rest"]
    if "@" in rest:
        rest = f"{REDACTED}@{rest.rpartition('@')[2]}"  # a password may contain an unescaped @ or /
    return match["scheme"] + _PARAMETER.sub(rf"\1={REDACTED}", rest)
