"""Remove credentials from text before it is stored or shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REDACTED = "***"

# For http(s), one slash is enough, because Path changes "http://user:password@host" to "http:/user:password@host".
_SCHEME = r"(?P<scheme>https?:/{1,2}|[a-z][a-z0-9+.-]{0,30}://)"

# In a text, an address ends at a space or a quote. A quote inside a word is a part of the address.
_URL = re.compile(rf"\b{_SCHEME}(?P<rest>(?:[^\s'\"<>]|['\"](?![\s,;:.)\]}}'\"<>]|$))+)", re.IGNORECASE)
_WHOLE_URL = re.compile(rf"{_SCHEME}(?P<rest>.+)", re.IGNORECASE | re.DOTALL)

_HOST_AND_PORT = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::\d{0,5})?")

_SECRET_NAME = (
    r"[^=&#;?]{0,60}(?:token(?!s|iz)|secret|passw|passphrase|pass(?![a-z])|pwd|auth(?!ors?(?![a-z]))|credential|signature"
    r"|(?<![a-z])sig(?![a-z])|key(?![a-z])|jwt|session|bearer)[^=&#;?]{0,60}"
)
_SECRET_PARAMETER = re.compile(rf"(?<=[?&#;])({_SECRET_NAME})=[^&#]+", re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"-*{_SECRET_NAME}|--?headers?|-[kHp]", re.IGNORECASE)
_ENCODED_URL = re.compile(r"(?<==)[^&#=]*%3A(?:%2F){1,2}[^&#]*(?:%40|@)[^&#]*", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace the credentials in each web address of a text with ``***``."""
    return _URL.sub(_redact_match, text) if ":/" in text else text


def redact_url(value: str) -> str:
    """Replace the credentials in a single web address with ``***``. The address can contain spaces and quotes."""
    match = _WHOLE_URL.fullmatch(value)
    return redact(value) if match is None else _redact_match(match)


def redact_command(words: Sequence[str]) -> str:
    """Return a command as one line for a shell, with ``***`` in place of credentials.

    Example:
        >>> redact_command(("env", "API_KEY=abc", "serve", "--token", "abc", "--small"))
        'env API_KEY=*** serve --token *** --small'
    """
    shown: list[str] = []
    is_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_secret:
            shown.append(REDACTED)
        elif equals and _SECRET_OPTION.fullmatch(name):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(shlex.quote(redact_url(word)))
        is_secret = word.startswith("-") and _SECRET_OPTION.fullmatch(word) is not None
    return " ".join(shown)


def has_redacted(url: str) -> bool:
    """Return whether a web address has ``***`` in place of credentials, and contains no credentials."""
    return redact_url(url) == url and REDACTED in url and _URL.search(url) is not None


def _redact_match(match: re.Match[str]) -> str:
    return match["scheme"] + _URL.sub(_redact_nested, _redact_rest(match["rest"]))


def _redact_nested(match: re.Match[str]) -> str:
    rest = _redact_rest(match["rest"])
    return match["scheme"] + (REDACTED if "@" in rest and _URL.search(rest) else rest)


def _redact_rest(rest: str) -> str:
    rest = _SECRET_PARAMETER.sub(rf"\1={REDACTED}", _without_user(rest))
    return _ENCODED_URL.sub(REDACTED, rest)


def _without_user(rest: str) -> str:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, host = authority.rpartition("@")
    # A password can contain "@" and "/". There is one if a colon precedes the "@" of the authority, or if the authority
    # is not a valid host and port, and an "@" follows later.
    if "@" in rest and (":" in user or (not at and not _HOST_AND_PORT.fullmatch(authority))):
        return f"{REDACTED}@{rest.rpartition('@')[2]}"
    return f"{REDACTED}@{host}{rest[len(authority) :]}" if at else rest


def redact_values(value: Any) -> Any:
    """Return a copy of a JSON value with all texts redacted. Lone surrogates are escaped."""
    if isinstance(value, str):
        return redact(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {redact_values(key): redact_values(item) for key, item in value.items()}
    return [redact_values(item) for item in value] if isinstance(value, list | tuple) else value


FIRST_SETTINGS = ("taskset", "model", "algorithm.name", "steps", "seed")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting in nested tables. ``prefix`` is put in front of each key."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def flat_settings(config: Mapping[str, Any]) -> dict[str, str | int | float | bool | None]:
    """Return nested settings by dotted key for display, the most important first, without credentials."""
    flat = {
        key: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for key, value in flatten(redact_values(config))
    }
    first = {name: flat[name] for name in FIRST_SETTINGS if name in flat}
    return {**first, **flat}
