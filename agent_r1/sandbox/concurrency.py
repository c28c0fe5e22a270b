"""How many programs run at the same time: clocks of programs that fight for the processor measure nothing."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from weakref import WeakKeyDictionary

MAX_CONCURRENT = 2 * (os.cpu_count() or 1)
"""Calls at work at the same time in one event loop; the next ones wait, and their time does not run yet."""

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def slot() -> AbstractAsyncContextManager[None]:
    """Wait for a place to run in."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))
