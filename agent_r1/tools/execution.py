"""Run a user's function, sync or async, so that it blocks nobody, ends in time and never raises.

Sync functions run in daemon threads. The standard executors are not used, because they wait at
exit for every thread: one hung tool would keep the process alive for ever. A thread that hangs is
left behind when its time is over and a fresh one takes its place; only a process could be killed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_THREADS = 128
"""Sync functions at work at the same time in one event loop; the next ones wait, and their time does not run yet."""

DEFAULT_TIMEOUT = 60.0
"""Seconds a tool or a reward may take where nothing else is said."""


GRACE_SECONDS = 0.5
"""What code may take to clean up once it was cancelled; after that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The function came back with this value."""

    value: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised; ``reason`` is one line, such as ``ValueError: no such page``."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The function did not come back within ``seconds``."""

    seconds: float


Outcome = Returned | Raised | TimedOut


async def run(work: Callable[[], object], timeout: float) -> Outcome:
    """Run ``work`` within ``timeout`` seconds; what goes wrong is a value. Only cancellation passes through.

    The time starts when the work does. An async function that blocks the event loop cannot be timed out.
    """
    if inspect.iscoroutinefunction(work):
        return await _within(_awaited(work), timeout)
    async with _permits():
        return await _within(_in_thread(work), timeout)


async def _within(outcome: Awaitable[Outcome], timeout: float) -> Outcome:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            return await severed(outcome)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _raised(error)  # the function cancelled something of its own: nobody cancelled us
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return TimedOut(timeout) if scope.expired() else _raised(error)


async def severed(work: Awaitable[T]) -> T:
    """What ``work`` gives, in a task of its own, so that a cancellation of ours is never swallowed by it.

    asyncio cancels once, and a bare ``except:`` in a retry loop takes that for one more failure. Such work is left
    behind ``GRACE_SECONDS`` after it was cancelled. What it raises is raised here.
    """
    task = asyncio.ensure_future(_kept(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
        raise
    ended = task.result()
    if isinstance(ended, _Failure):
        raise ended.error
    return ended


class _Failure:
    """Carries out of a task what would end the event loop if the task itself raised it, as SystemExit does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _kept(work: Awaitable[T]) -> T | _Failure:
    try:
        return await work
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return _Failure(error)


async def _awaited(work: Callable[[], object]) -> Outcome:
    value = work()
    return Returned(await value if inspect.isawaitable(value) else value)


async def _in_thread(work: Callable[[], object]) -> Outcome:
    """Run ``work`` in a thread. A sync function may also return an awaitable, which is awaited here."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def job() -> None:
        outcome = _caught(work)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, outcome)

    _threads.submit(job)
    outcome = await future
    if isinstance(outcome, Returned) and inspect.isawaitable(outcome.value):
        return Returned(await outcome.value)
    return outcome


def _caught(work: Callable[[], object]) -> Outcome:
    try:
        return Returned(work())
    except BaseException as error:  # in a thread of ours, sys.exit() is a tool's failure like any other
        return _raised(error)


def _raised(error: BaseException) -> Raised:
    _log.debug("a tool or reward raised", exc_info=error)
    return Raised(" ".join(traceback.format_exception_only(error)[-1].split()))


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class _DaemonThreads:
    """Threads that are reused, and added where none is idle."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name="agent-r1-tool", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_threads = _DaemonThreads()
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _permits() -> asyncio.Semaphore:
    """The running loop's own semaphore: one of asyncio's cannot be shared between loops."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
