"""Graceful shutdown: after the first SIGINT or SIGTERM a run saves its last step and stops; a second one ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType

from agent_r1.core.errors import AgentR1Error
from agent_r1.training.progress import Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ShutdownRequested(AgentR1Error):
    """A shutdown was requested, and no update, validation or recording is half done."""


class GracefulShutdown:
    """The state of a requested shutdown.

    A shutdown takes effect only inside :meth:`interruptible` blocks. Rollouts can be cancelled, because they can be
    repeated; an update, its events and its validation belong together and are finished first.

    Attributes:
        signal: the number of the signal that requested it, None if there was none.
    """

    def __init__(self, progress: Progress) -> None:
        self.signal: int | None = None
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark a block that may be cancelled at any await.

        Raises:
            ShutdownRequested: if a shutdown was requested before the block, or is requested inside it.
        """
        if self.signal is not None:
            raise ShutdownRequested
        self._task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            # More requests than this one: the caller cancelled the task too.
            if self.signal is None or task is None or task.uncancel() > 0:
                raise
            raise ShutdownRequested from None
        finally:
            self._task = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Python may call this between any two instructions of the main thread."""
        if self.signal is None:
            self.signal = number
            # In the context of the run: the signal may have interrupted user code, which cannot cancel the run.
            self._loop.call_soon_threadsafe(self._cancel, context=self._context)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _cancel(self) -> None:
        self._progress.print_line(
            "stopping after the update or validation in progress; send the signal again to stop at once"
        )
        if self._task is not None:
            self._task.cancel()


_active: list[GracefulShutdown] = []


def request_shutdown(number: int) -> bool:
    """Ask the runs in other threads to stop, as the signal ``number`` does; return whether there is any."""
    active = list(_active)
    for shutdown in active:
        shutdown.handle(number, None)
    return bool(active)


@contextmanager
def handle_signals(progress: Progress) -> Iterator[GracefulShutdown]:
    """Install SIGINT and SIGTERM handlers for the duration of the block.

    Outside the main thread none is installed, and a signal that is ignored stays ignored.
    """
    shutdown, before = GracefulShutdown(progress), {}
    _active.append(shutdown)
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, shutdown.handle) for number in handled}
    try:
        yield shutdown
    finally:
        _active.remove(shutdown)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
