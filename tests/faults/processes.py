"""Processes that can be killed, forked from one that has imported everything and run nothing."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PAUSE = 0.05
"""Seconds between signals: two pending signals of one kind would become one."""

FORK = multiprocessing.get_context("fork")

MAX_SECONDS = 1200.0
"""Default time after which a process counts as hung. Far more than any needs, because machines may be busy."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process: killed, or the value that its work returned, or the error that it raised."""

    killed: bool
    value: Any = None
    error: str | None = None


class Child:
    """Runs work in a separate process, started at once."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._receiving, sending = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_run_and_send, args=(sending, work, arguments))
        self._process.start()
        sending.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait_until_suspended(self) -> bool:
        """Wait until the process is suspended or ends; return whether it is suspended."""
        status = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def resume(self) -> None:
        """Continue a suspended process."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, seconds: float = MAX_SECONDS) -> Ended:
        """Wait for the end of the process. A process that hangs is killed, with an error."""
        ended: Ended | None = None
        hung = not self._receiving.poll(seconds)
        if hung:
            self._process.kill()
        else:
            try:
                ended = self._receiving.recv()
            except EOFError:
                ended = None
        self._process.join()
        if hung:
            return Ended(False, error=f"hung for {seconds:.0f} s")
        return ended or Ended(self._process.exitcode == -signal.SIGKILL, error=f"exit code {self._process.exitcode}")


def _run_and_send(sending: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        ended = Ended(False, work(*arguments))
    except SystemExit as error:
        ended = Ended(False, error=f"exit code {error.code}")
    except BaseException as error:
        ended = Ended(False, error=f"{type(error).__name__}: {error} {traceback.format_exc(limit=-3)}")
    sending.send(ended)


class Countdown:
    """Counts calls from all threads, and sends this process signals at call number ``last``."""

    def __init__(self, last: int, signals: Sequence[signal.Signals] = (signal.SIGKILL,)) -> None:
        self._numbers, self._last, self._signals = itertools.count(1), last, signals
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count = next(self._numbers)
        if self.count == self._last:
            for one in self._signals:
                os.kill(os.getpid(), one)
                time.sleep(PAUSE)
