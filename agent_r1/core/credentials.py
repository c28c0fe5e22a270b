"""Credentials, such as API keys, from environment variables."""

from __future__ import annotations

import os

from agent_r1.core.errors import InvalidInput


def read_credential(variable: str) -> str:
    """Return the credential in an environment variable, stripped of white space; "" if the variable is not set.

    Raise InvalidInput if an HTTP header cannot contain the credential. The message does not show the credential.
    """
    value = os.environ.get(variable, "").strip()
    if not (value.isascii() and value.isprintable()):
        got = f"{len(value)} characters, some of which are not printable ASCII"
        raise InvalidInput(variable, got=got, do="set it to the credential alone, in one line")
    return value
