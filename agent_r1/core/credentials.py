"""Credentials, such as API keys, that the user gives in environment variables."""

from __future__ import annotations

import os

from agent_r1.core.errors import InvalidInput


def read_credential(variable: str) -> str:
    """Return the credential in an environment variable, without spaces and line ends around it; "" if it is not set.

    Raise InvalidInput if the credential has a character that an HTTP header cannot have. The message does not contain
    the credential. Without this check, the HTTP client would repeat the credential in its error.
    """
    value = os.environ.get(variable, "").strip()
    if not (value.isascii() and value.isprintable()):
        got = f"{len(value)} characters, some of which are not printable ASCII"
        raise InvalidInput(variable, got=got, do="set it to the credential alone, in one line")
    return value
