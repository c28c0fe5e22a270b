"""The package's exceptions.

    AgentR1Error
      InvalidInput      the user's input cannot be used; the command line prints one line and exits with 2
      EngineError       an engine could not generate; the attempt ends with Status.ENGINE_FAILED
      RunStopped        a run with no prospect of learning was stopped; the command line prints why and exits with 1
      UnsupportedChat   a chat template cannot render the conversation
    KeyboardInterrupt
      Interrupted       a run was stopped by a signal; the command line prints how to resume it

A failure inside an episode is never raised out of a rollout: it becomes a ``Status`` and a reason of the trajectory.
"""

from pathlib import Path

from agent_r1.core.redaction import redact

MAX_SHOWN, MAX_REMEDY = 400, 1500
"""Characters of a value, and of the remedy, that an error message shows."""


class AgentR1Error(Exception):
    """Base class of all exceptions that this package raises deliberately."""


class InvalidInput(AgentR1Error):
    """The user's input cannot be used. The message names in one line the input, its value, and the remedy.

    A value of more than MAX_SHOWN characters is shortened, and credentials in addresses are removed.

    Example:
        >>> str(InvalidInput("steps", got=-1, do="give a number of steps >= 1"))
        'steps: got -1; give a number of steps >= 1'
    """

    def __init__(self, what: str, *, got: object, do: str) -> None:
        self.what, self.got, self.do = what, got, do
        super().__init__(redact(f"{shorten(what)}: got {shorten(got)}; {shorten(do, MAX_REMEDY)}"))


class EngineError(AgentR1Error):
    """An engine could not complete a generation."""


class RunStopped(AgentR1Error):
    """A run was stopped because it would learn nothing. The message is a diagnosis of several lines."""


class UnsupportedChat(AgentR1Error):
    """A chat template cannot render the conversation; the message names the missing part."""


class Interrupted(KeyboardInterrupt):
    """The run in ``folder`` was stopped in order by the signal ``number`` and can be resumed."""

    def __init__(self, number: int, message: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        super().__init__(message)


def shorten(value: object, most: int = MAX_SHOWN) -> str:
    """Return a value as text for an error message: its beginning and its length if it is very long."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        text = hex(value) if isinstance(value, int) else type(value).__name__
    return text if len(text) <= most else f"{text[: most // 2]}.. ({len(text)} characters)"
