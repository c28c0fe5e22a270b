"""Graceful shutdown of a run.

After the first SIGINT or SIGTERM, the run completes its update, saves its last step, and stops. A second signal stops
the run at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agent_r1.core.errors import AgentR1Error
from agent_r1.training.progress import Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ShutdownRequested(AgentR1Error):
    """Raised to stop a run after a shutdown was requested."""


class GracefulShutdown:
    """The shutdown of a run, which ``signal`` requested. It stops only inside blocks of :meth:`interruptible`."""

    def __init__(self, progress: Progress) -> None:
        self.signal: int | None = None
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a shutdown cancel the ``with`` block at any ``await``, and raise ShutdownRequested then."""
        if self.signal is not None:
            raise ShutdownRequested
        self._task = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            # If uncancel() is above 0, the caller of the task cancelled the task too.
            if self.signal is None or task is None or task.uncancel() > 0:
                raise
            raise ShutdownRequested from None
        finally:
            self._task = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Request a shutdown; at the second signal, stop the process.

        Python can call this between any two instructions, so it only asks the event loop to cancel the run.
        """
        if self.signal is None:
            self.signal = number
            self._loop.call_soon_threadsafe(self._cancel)
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
    """Shut down all active runs, as if the signal ``number`` had arrived. Return whether a run was active."""
    active = list(_active)
    for shutdown in active:
        shutdown.handle(number, None)
    return bool(active)


@contextmanager
def handle_signals(progress: Progress) -> Iterator[GracefulShutdown]:
    """Yield a :class:`GracefulShutdown` that SIGINT and SIGTERM request during the ``with`` block."""
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
