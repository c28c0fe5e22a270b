"""The package's exceptions.

A rollout never raises an error for a failure inside an episode. The trajectory gets a ``Status`` and a reason instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent_r1.core.redaction import redact, redact_url

MAX_SHOWN, MAX_REMEDY = 400, 1500
"""The maximum length of a value and of a remedy in an error message, in characters."""

MAX_ADDRESS = 10_000
"""A longer value is no web address. It is shortened before credentials are searched, which takes time."""


class AgentR1Error(Exception):
    """The base class of this package's exceptions."""


class InvalidInput(AgentR1Error):
    """Raised if input from the user cannot be used. The message is one line: the input, its value, the remedy.

    Example:
        >>> str(InvalidInput("steps", got=-1, do="give a number of steps >= 1"))
        'steps: got -1; give a number of steps >= 1'
    """

    def __init__(self, what: str, *, got: object, do: str) -> None:
        self.what, self.got, self.do = what, got, do
        shown = shorten(redact_url(got) if isinstance(got, str) and len(got) <= MAX_ADDRESS else got)
        super().__init__(redact(f"{shorten(what)}: got {shown}; {shorten(do, MAX_REMEDY)}"))

    def __reduce__(self) -> tuple[object, ...]:  # pickled for another process: the value becomes text
        return partial(InvalidInput, self.what, got=str(self.got), do=self.do), ()


class EngineError(AgentR1Error):
    """Raised if an engine cannot complete a generation. The attempt ends with ``Status.ENGINE_FAILED``."""


class RunStopped(AgentR1Error):
    """Raised if a health check stops the run. The message is a diagnosis of several lines."""


class UnsupportedChat(AgentR1Error):
    """Raised if a chat template or a tool format cannot render a conversation."""


class Interrupted(KeyboardInterrupt):
    """Raised if the signal ``number`` stops the run in ``folder``."""

    def __init__(self, number: int, message: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        super().__init__(message)


def shorten(value: object, most: int = MAX_SHOWN) -> str:
    """Return ``value`` as text for an error message. A text of more than ``most`` characters is cut."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}.. ({len(text)} characters)"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is most similar to ``name``; "" if no known name is similar."""
    known = list(known)
    parts = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known)}  # of equal parts, the first
    part = name.rpartition(".")[2]
    # "lr" for "learning_rate" first: "trainer.lr" has more letters in common with "trainer.ranks".
    similar = [parts[last] for last in parts if "_" in last and part == "".join(word[:1] for word in last.split("_"))]
    similar = similar or [one for one in known if one.lower() == name.lower()] or get_close_matches(name, known, 1)
    similar = similar or [parts[last] for last in get_close_matches(part, parts, 1)]
    return f"did you mean {similar[0]!r}?" if similar else ""


def import_extra(name: str, extra: str) -> Any:
    """Import and return the module ``name`` of an optional dependency. Raise InvalidInput if it is not installed."""
    require_extra(name, extra)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:  # of a package that this one needs
        raise _not_installed((error.name or name).partition(".")[0], extra) from error


def require_extra(name: str, extra: str) -> None:
    """Raise InvalidInput if the module ``name`` is not installed. The module is not imported."""
    if find_spec(name.split(".")[0]) is None:
        raise _not_installed("it", extra)


def _not_installed(package: str, extra: str) -> InvalidInput:
    got = f"an environment without {package}"
    return InvalidInput(f"extra {extra}", got=got, do=f"pip install 'agent-r1[{extra}]'")


def read_credential(variable: str) -> str:
    """Return the credential in an environment variable, stripped of white space; "" if the variable is not set."""
    value = os.environ.get(variable, "").strip()
    if not (value.isascii() and value.isprintable()):
        got = f"{len(value)} characters, some of which are not printable ASCII"
        raise InvalidInput(variable, got=got, do="set it to the credential alone, in one line")
    return value
