"""Results of programs in the sandbox. Whatever a program does becomes a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExecutionStatus(StrEnum):
    """How a call ended. Only NOT_STARTED is a failure of the sandbox: the sample should then be dropped."""

    OK = "ok"
    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    FLOODED = "flooded"
    DIED = "died"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Output:
    """The output on one stream, up to the limit, and the number of bytes that were dropped after it.

    Example:
        Output(b"caf\\xc3\\xa9\\n").text == "café\\n"
        Output(b"ab", dropped=10**9)        # the program flooded the stream
    """

    data: bytes = b""
    dropped: int = 0

    @property
    def text(self) -> str:
        """The bytes as UTF-8; invalid bytes become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one call.

    The status and the output are reported by the program's own process, which can print anything and exit early. To
    learn whether a function is correct, use :meth:`Sandbox.grade`.

    Attributes:
        status: how the call ended.
        stdout: the output on stdout.
        stderr: the output on stderr.
        error: a traceback if the program raised, "" if the status is OK, otherwise a line with the reason.
        seconds: wall-clock time, without the start of the process.
        restarted: whether the interpreter of earlier calls was lost, and this call began with a fresh one.

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
        """Whether the process can take another call."""
        return self.status in (ExecutionStatus.OK, ExecutionStatus.RAISED, ExecutionStatus.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate passed its tests. None: it could not be graded, for a reason that is not its fault.

    Example:
        Verdict(False, "AssertionError")
    """

    passed: bool | None
    reason: str = ""
