"""The package's exceptions.

A rollout never raises an error for a failure inside an episode. The trajectory gets a ``Status`` and a reason instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent_r1.core.redaction import redact, redact_url

MAX_SHOWN, MAX_REMEDY = 400, 1500
"""The maximum length of a value and of a remedy in an error message, in characters."""

MAX_ADDRESS = 10_000
"""If a value has at most this many characters, an error message removes credentials before it shortens the value.

A longer value is shortened first.
"""


class AgentR1Error(Exception):
    """The base class of this package's exceptions."""


class InvalidInput(AgentR1Error):
    """Raised if input from the user cannot be used. The message is one line: the input, its value, the remedy.

    A long value is shortened. Credentials in web addresses are removed.

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
    """Raised if a signal stops a run.

    Attributes:
        number: the number of the signal.
        folder: the folder of the run.
    """

    def __init__(self, number: int, message: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        super().__init__(message)


def shorten(value: object, most: int = MAX_SHOWN) -> str:
    """Return ``value`` as text for an error message.

    If the text is longer than the limit (the argument ``most``, in characters), the text is cut to ``most // 2``
    characters, and the length of the whole text is appended.
    """
    try:
        text = str(value)
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        text = hex(value) if isinstance(value, int) else type(value).__name__
    return text if len(text) <= most else f"{text[: most // 2]}.. ({len(text)} characters)"


_CUTOFF = 0.6  # the default of difflib.get_close_matches
_PART_WEIGHT = 0.98  # a match of the last part only ("high" for "loss.high") ranks just below a match of the whole name


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is most similar to ``name``; "" if no known name is similar."""
    rated = [(_similarity(name, candidate), candidate) for candidate in known]
    similarity, closest = max(rated, key=lambda pair: pair[0], default=(0.0, ""))  # max returns the first of equals
    return f"did you mean {closest!r}?" if similarity >= _CUTOFF else ""


def _similarity(name: str, candidate: str) -> float:
    words = candidate.rpartition(".")[2].split("_")
    part, name_part = "_".join(words), name.rpartition(".")[2]
    by_initials = len(words) > 1 and name_part == "".join(word[:1] for word in words)
    by_part = max(SequenceMatcher(None, part, name_part).ratio(), by_initials)
    return max(SequenceMatcher(None, candidate, name).ratio(), _PART_WEIGHT * by_part)


def import_extra(name: str, extra: str) -> Any:
    """Import and return the module ``name`` of an optional dependency."""
    require_extra(name, extra)
    return import_module(name)


def require_extra(name: str, extra: str) -> None:
    """Raise InvalidInput if the module ``name`` is not installed. The module is not imported."""
    if find_spec(name.split(".")[0]) is None:
        raise InvalidInput(f"extra {extra}", got="an environment without it", do=f"pip install 'agent-r1[{extra}]'")


def read_credential(variable: str) -> str:
    """Return the credential in an environment variable, stripped of white space; "" if the variable is not set.

    Raise InvalidInput if an HTTP header cannot contain the credential. The message does not show the credential.
    """
    value = os.environ.get(variable, "").strip()
    if not (value.isascii() and value.isprintable()):
        got = f"{len(value)} characters, some of which are not printable ASCII"
        raise InvalidInput(variable, got=got, do="set it to the credential alone, in one line")
    return value
