"""The limit on concurrent programs: time limits mean nothing if programs compete for the processor."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from weakref import WeakKeyDictionary

MAX_CONCURRENT = 2 * (os.cpu_count() or 1)
"""The largest number of concurrent calls in one event loop. Further calls wait, and their time limit does not start
yet."""

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def slot() -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits for a free slot and holds it."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))
