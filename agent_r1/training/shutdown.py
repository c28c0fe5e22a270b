"""Stopping a run by hand: the first SIGINT or SIGTERM lets it save itself, the second does not wait."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agent_r1.core.errors import AgentR1Error
from agent_r1.training.report import Progress

HEEDED = (signal.SIGINT, signal.SIGTERM)


class Halting(AgentR1Error):
    """The run was asked to stop, and nothing that cannot be done again is under way."""


class Halt:
    """Whether a run was asked to stop, and by which signal.

    It takes effect inside :meth:`section` alone: acting can be cancelled, and is done again; an update, what is
    written down of it and its validation belong together.
    """

    def __init__(self, progress: Progress) -> None:
        self.signal: int | None = None
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._inside: asyncio.Task[object] | None = None

    @contextmanager
    def section(self) -> Iterator[None]:
        """A stretch that can be left at any moment. Raises Halting once the run was asked to stop."""
        if self.signal is not None:
            raise Halting
        self._inside = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.signal is None or task is None or task.uncancel() > 0:
                raise  # somebody else cancelled it, too
            raise Halting from None
        finally:
            self._inside = None

    def heed(self, number: int, frame: FrameType | None) -> None:
        """Take a signal: a handler, which may run between any two instructions of the main thread."""
        if self.signal is None:
            self.signal = number
            self._loop.call_soon_threadsafe(self._leave)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _leave(self) -> None:
        self._progress.say("stopping; an update or a validation under way ends first; once more to leave at once")
        if self._inside is not None:
            self._inside.cancel()


@contextmanager
def heeding(progress: Progress) -> Iterator[Halt]:
    """A halt that signals ask for while the block runs. Only the main thread is sent any; what is ignored stays so."""
    halt, before = Halt(progress), {}
    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in HEEDED if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, halt.heed) for number in heeded}
    try:
        yield halt
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
