"""The errors of the project, and who may see them.

    AgentR1Error
      InvalidInput      what a user gave cannot be used; the doors print one line and exit with 2
      EngineError       an engine could not generate; the collector turns it into Status.ENGINE_FAILED
      RunStopped        a run that could only go wrong was stopped; the doors print its diagnosis and exit with 1
      UnsupportedChat   a chat template cannot do what the conversation needs
    KeyboardInterrupt
      Interrupted       a run was asked to stop by a signal, and did; the doors print how to go on

A failure inside an episode never crosses the rollout boundary as an exception: it becomes a
``Status`` and a reason on the trajectory. Errors of ours are for what a person has to mend.
"""

from pathlib import Path


class AgentR1Error(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(AgentR1Error):
    """A user's input cannot be used. Says what, what was got, and what to do, in one line.

    Example:
        >>> str(InvalidInput("steps", got=-1, do="give a number of steps >= 1"))
        'steps: got -1; give a number of steps >= 1'
    """

    def __init__(self, what: str, *, got: object, do: str) -> None:
        self.what, self.got, self.do = what, got, do
        super().__init__(f"{what}: got {got}; {do}")


class EngineError(AgentR1Error):
    """An engine could not complete a generation."""


class RunStopped(AgentR1Error):
    """A run was stopped that would learn nothing, or something wrong. Its text is a diagnosis of several lines."""


class UnsupportedChat(AgentR1Error):
    """A chat template cannot render what the conversation needs; says what to supply."""


class Interrupted(KeyboardInterrupt):
    """The run in ``folder`` was asked to stop by the signal of this ``number``, and did in order: it can be resumed."""

    def __init__(self, number: int, said: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        super().__init__(said)
