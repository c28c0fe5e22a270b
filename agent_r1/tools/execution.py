"""Run a user's function, sync or async, so that it blocks nobody, ends in time and never raises.

Sync functions run in daemon threads. The standard executors are not used, because they wait at
exit for every thread: one hung tool would keep the process alive for ever. A thread that hangs is
left behind when its time is over and a fresh one takes its place; only a process could be killed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from agent_r1.core.threads import DaemonThreads, run_in_thread

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_THREADS = 128
"""Sync functions at work at the same time in one event loop; the next ones wait, and their time does not run yet."""

DEFAULT_TIMEOUT = 60.0
"""Seconds a tool or a reward may take where nothing else is said."""


GRACE_SECONDS = 0.5
"""What code may take to clean up once it was cancelled; after that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class ReturnValue:
    """The function came back with this value."""

    value: object


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The function raised; ``reason`` is one line, such as ``ValueError: no such page``."""

    reason: str


@dataclass(frozen=True, slots=True)
class CallTimeout:
    """The function did not come back within ``seconds``."""

    seconds: float


CallOutcome = ReturnValue | CallFailure | CallTimeout


async def run_with_timeout(work: Callable[[], object], timeout: float) -> CallOutcome:
    """Run ``work`` within ``timeout`` seconds; what goes wrong is a value. Only cancellation passes through.

    The time starts when the work does. An async function that blocks the event loop cannot be timed out.
    """
    if inspect.iscoroutinefunction(work):
        return await _within(_awaited(work), timeout)
    async with _permits():
        return await _within(_in_thread(work), timeout)


async def _within(outcome: Awaitable[CallOutcome], timeout: float) -> CallOutcome:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            return await run_detached(outcome)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _raised(error)  # the function cancelled something of its own: nobody cancelled us
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return CallTimeout(timeout) if scope.expired() else _raised(error)


async def run_detached(work: Awaitable[T]) -> T:
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


async def _awaited(work: Callable[[], object]) -> CallOutcome:
    value = work()
    return ReturnValue(await value if inspect.isawaitable(value) else value)


async def _in_thread(work: Callable[[], object]) -> CallOutcome:
    """Run ``work`` in a thread. A sync function may also return an awaitable, which is awaited here."""
    outcome = await run_in_thread(_caught, work, pool=_threads)
    if isinstance(outcome, ReturnValue) and inspect.isawaitable(outcome.value):
        return ReturnValue(await outcome.value)
    return outcome


def _caught(work: Callable[[], object]) -> CallOutcome:
    try:
        return ReturnValue(work())
    except BaseException as error:  # in a thread of ours, sys.exit() is a tool's failure like any other
        return _raised(error)


def _raised(error: BaseException) -> CallFailure:
    _log.debug("a tool or reward raised", exc_info=error)
    return CallFailure(" ".join(traceback.format_exception_only(error)[-1].split()))


_threads = DaemonThreads("agent-r1-tool")
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _permits() -> asyncio.Semaphore:
    """The running loop's own semaphore: one of asyncio's cannot be shared between loops."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
