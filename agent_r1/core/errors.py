"""The package's exceptions.

A rollout never raises an error for a failure inside an episode. The trajectory gets a ``Status`` and a reason instead.
"""

from functools import partial
from pathlib import Path

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
