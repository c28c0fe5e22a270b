"""Processes to be killed: forked from one that has loaded everything and run nothing, so that each begins the same."""

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
"""Seconds between signals: two of one kind that wait are one."""

FORK = multiprocessing.get_context("fork")

HUNG_SECONDS = 240.0
"""A process that takes so long is taken for hung, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: killed, or with what its work gave, or with what it raised."""

    killed: bool
    value: Any = None
    error: str | None = None


class Child:
    """Work in a process of its own, begun at once."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._receiving, sending = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_tell, args=(sending, work, arguments))
        self._process.start()
        sending.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def stopped(self) -> bool:
        """Wait until it stops or ends; whether it stopped."""
        seen = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return seen is not None and seen.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        """Let it go on that had stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, seconds: float = HUNG_SECONDS) -> Ended:
        """How it ended; one that hangs is killed, and that is its error."""
        said: Ended | None = None
        hung = not self._receiving.poll(seconds)
        if hung:
            self._process.kill()
        else:
            try:
                said = self._receiving.recv()
            except EOFError:
                said = None
        self._process.join()
        if hung:
            return Ended(False, error=f"hung for {seconds:.0f} s")
        return said or Ended(self._process.exitcode == -signal.SIGKILL, error=f"exit code {self._process.exitcode}")


def _tell(sending: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        ended = Ended(False, work(*arguments))
    except SystemExit as error:
        ended = Ended(False, error=f"exit code {error.code}")
    except BaseException as error:
        ended = Ended(False, error=f"{type(error).__name__}: {error} {traceback.format_exc(limit=-3)}")
    sending.send(ended)


class Countdown:
    """Counts what happens, in whatever thread, and sends this process signals at the ``last`` of it."""

    def __init__(self, last: int, signals: Sequence[signal.Signals] = (signal.SIGKILL,)) -> None:
        self._numbers, self._last, self._signals = itertools.count(1), last, signals
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count = next(self._numbers)
        if self.count == self._last:
            for one in self._signals:
                os.kill(os.getpid(), one)
                time.sleep(PAUSE)
