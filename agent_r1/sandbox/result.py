"""How a program ended: a value, whatever the program did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExecutionStatus(StrEnum):
    """How a call ended. Only NOT_STARTED is the sandbox's fault: whoever scores drops the sample then."""

    OK = "ok"
    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    FLOODED = "flooded"
    DIED = "died"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Output:
    """What was written to one stream: at most the limit, and how many bytes were dropped after that.

    Example:
        Output(b"caf\\xc3\\xa9\\n").text == "café\\n"
        Output(b"ab", dropped=10**9)        # somebody flooded it
    """

    data: bytes = b""
    dropped: int = 0

    @property
    def text(self) -> str:
        """The bytes as UTF-8; what is none becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one call came to.

    ``error`` is a traceback where the program raised, otherwise one line that says what happened; ""
    where all went well. ``seconds`` is wall-clock time without the start of the process. ``restarted``:
    an interpreter that was to be kept had been lost, and this call began with a fresh one.

    ``ended`` and the output are what the program's own process reported: a program can print anything
    and end early. To learn whether a *function* is right, ask :meth:`Sandbox.grade`.

    Example:
        ExecutionResult(ExecutionStatus.OK, stdout=Output(b"4\\n"), seconds=0.002)
        ExecutionResult(ExecutionStatus.TIMED_OUT, error="stopped after 10 seconds", seconds=10.0)
    """

    status: ExecutionStatus
    stdout: Output = Output()
    stderr: Output = Output()
    error: str = ""
    seconds: float = 0.0
    restarted: bool = False

    @property
    def ok(self) -> bool:
        return self.status is ExecutionStatus.OK

    @property
    def alive(self) -> bool:
        """Whether the process that ran it can take another call."""
        return self.status in (ExecutionStatus.OK, ExecutionStatus.RAISED, ExecutionStatus.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate passed its tests. None: it could not be judged, and that is not the candidate's fault.

    Example:
        Verdict(False, "AssertionError")
    """

    passed: bool | None
    reason: str = ""
