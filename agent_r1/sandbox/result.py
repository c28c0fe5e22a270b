"""The results of programs in the sandbox. Errors and crashes of a program are results too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExecutionStatus(StrEnum):
    """How the execution of code in a sandbox ended. Only NOT_STARTED is a failure of the sandbox itself."""

    OK = "ok"
    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    FLOODED = "flooded"
    DIED = "died"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one call on one stream (stdout or stderr).

    ``data`` is the output up to the limit. ``dropped`` is the number of bytes after the limit.

    Example:
        Output(b"caf\\xc3\\xa9\\n").text == "café\\n"
        Output(b"ab", dropped=10**9)        # the program flooded the stream
    """

    data: bytes = b""
    dropped: int = 0

    @property
    def text(self) -> str:
        """The kept output as UTF-8. Invalid bytes become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one call: one execution of code in a sandbox.

    An untrusted program can forge its status and output. To test a function, use :meth:`Sandbox.grade`.

    Attributes:
        error: "" if the status is OK, a traceback if the program raised an exception, otherwise the reason in one line.
        seconds: the wall-clock time of the call, without the start of the process.
        restarted: whether the interpreter was restarted before the call, and lost its variables.

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
        """Whether the process still runs and accepts another call."""
        return self.status in (ExecutionStatus.OK, ExecutionStatus.RAISED, ExecutionStatus.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of grading a candidate. A candidate is untrusted code whose functions are called by tests.

    Attributes:
        passed: whether the candidate passed the tests; None if the sandbox or the tests failed.
        reason: why the candidate did not pass or could not be graded, or "".

    Example:
        Verdict(passed=False, reason="AssertionError")
    """

    passed: bool | None
    reason: str = ""
