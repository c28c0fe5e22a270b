"""The limit on the number of programs that run at the same time.

If too many programs ran at the same time, correct programs would exceed their time limits.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from weakref import WeakKeyDictionary

MAX_CONCURRENT = 2 * (os.cpu_count() or 1)
"""The limit on the number of programs that run at the same time in one event loop. Further programs wait."""

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def slot() -> AbstractAsyncContextManager[None]:
    """Return a context manager that limits the number of programs that run at the same time.

    Run each program inside ``async with slot():``. If ``MAX_CONCURRENT`` programs already run in the event loop, the
    context manager waits until a program has ended.
    """
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))
