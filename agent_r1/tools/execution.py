"""Run user functions, sync or async, with a time limit and without blocking the event loop.

Sync functions run in daemon threads (:mod:`agent_r1.core.threads`). A thread cannot be stopped from outside: if a
function exceeds its time limit, its thread is abandoned, and the next call uses another one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from agent_r1.core.tasks import user_code_task
from agent_r1.core.threads import DaemonThreads, run_in_thread

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_THREADS = 128
"""The largest number of sync functions that run at the same time in one event loop. Further calls wait, and their time
limit does not start yet."""

DEFAULT_TIMEOUT = 60.0
"""The default time limit of a tool or a reward, in seconds."""

PACKAGE_FOLDER, PYTHON_FOLDER = Path(__file__).parents[1], Path(os.__file__).parent

GRACE_SECONDS = 0.5
"""The time that cancelled code has to clean up, in seconds. After that it is abandoned."""


@dataclass(frozen=True, slots=True)
class ReturnValue:
    """The function returned ``value``."""

    value: object


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The function raised an exception; ``reason`` is one line, such as ``ValueError: no such page``.

    ``location`` is the line of the user's own code that raised it, such as `` (env.py:12, in find)``. A policy does not
    see it.
    """

    reason: str
    location: str = ""


@dataclass(frozen=True, slots=True)
class CallTimeout:
    """The function did not return within ``seconds``."""

    seconds: float


CallOutcome = ReturnValue | CallFailure | CallTimeout


async def run_with_timeout(work: Callable[[], object], timeout: float) -> CallOutcome:
    """Run ``work`` and return its outcome. Exceptions become values; only a cancellation of the caller is raised.

    The time limit begins when ``work`` does. An async function that blocks the event loop cannot be timed out.

    Args:
        work: a sync or an async function without arguments.
        timeout: seconds.
    """
    if inspect.iscoroutinefunction(work):
        return await _limit(_run_async(work), timeout)
    async with _thread_slots():
        return await _limit(_run_sync(work), timeout)


async def _limit(outcome: Awaitable[CallOutcome], timeout: float) -> CallOutcome:
    scope, task = asyncio.timeout(timeout), current_task()
    try:
        async with scope:
            return await run_detached(outcome)
    except BaseException as error:
        if not is_user_error(error, task):
            raise
        return CallTimeout(timeout) if scope.expired() else _describe(error)


def current_task() -> asyncio.Task[object] | None:
    """Return the task that is running; None if there is none, or no event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_user_error(error: BaseException, task: asyncio.Task[object] | None) -> bool:
    """Return whether user code raised ``error``, which was caught in ``task``.

    The other possibilities are a cancellation of the task, an interrupt by a signal, and the end of the event loop,
    which closes coroutines with a GeneratorExit that no task is running.
    """
    match error:
        case asyncio.CancelledError():
            return task is not None and not task.cancelling()
        case GeneratorExit():
            return current_task() is task
        case KeyboardInterrupt():
            return not is_interrupt(error)
        case _:
            return True


def is_interrupt(error: KeyboardInterrupt) -> bool:
    """Return whether a signal raised ``error``: the innermost frame is then a signal handler of asyncio or ours.

    Python's default handler has no frame. While it is installed, every KeyboardInterrupt counts as an interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return not is_user_file(Path(frame.f_code.co_filename))


def is_user_file(file: Path) -> bool:
    """Return whether a source file belongs neither to this package nor to Python nor to an installed package."""
    own = file.is_relative_to(PACKAGE_FOLDER) or file.is_relative_to(PYTHON_FOLDER)
    return not own and "site-packages" not in file.parts


def user_code_location(error: BaseException) -> str:
    """Return the innermost line of the user's own code in the traceback of an error; "" if there is none.

    Example:
        " (env.py:12, in find)"
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if is_user_file(file) and file.is_file():
            return f" ({file.name}:{line}, in {frame.f_code.co_name})"
    return ""


async def run_detached(work: Awaitable[T]) -> T:
    """Return the result of ``work``, which runs in a task of its own, so that it cannot swallow a cancellation.

    asyncio cancels a task once, and a bare ``except:`` in a retry loop catches that like any other exception. If the
    caller is cancelled, ``work`` is cancelled too and abandoned after ``GRACE_SECONDS``. An exception of ``work`` is
    raised here. ``work`` itself cannot cancel the caller (:mod:`agent_r1.core.tasks`).
    """
    task = user_code_task(_capture(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
        raise
    result = task.result()
    if isinstance(result, _CapturedError):
        raise result.error
    return result


@dataclass(frozen=True, slots=True)
class _CapturedError:
    """An exception, such as SystemExit, that would end the event loop if the task itself raised it."""

    error: BaseException


async def _capture(work: Awaitable[T]) -> T | _CapturedError:
    task = current_task()
    try:
        return await work
    except BaseException as error:
        # A cancellation of this task is captured too: its caller, who cancelled it, does not look at the result.
        if isinstance(error, asyncio.CancelledError) or is_user_error(error, task):
            return _CapturedError(error)
        raise


async def _run_async(work: Callable[[], object]) -> CallOutcome:
    value = work()
    return ReturnValue(await value if inspect.isawaitable(value) else value)


async def _run_sync(work: Callable[[], object]) -> CallOutcome:
    """Run ``work`` in a thread. A sync function may also return an awaitable, which is awaited here."""

    def job() -> CallOutcome:
        try:
            return ReturnValue(work())
        except BaseException as error:  # in a thread, sys.exit() is a failure of the tool like any other
            return _describe(error)

    outcome = await run_in_thread(job, pool=_threads)
    if isinstance(outcome, ReturnValue) and inspect.isawaitable(outcome.value):
        return ReturnValue(await outcome.value)
    return outcome


def _describe(error: BaseException) -> CallFailure:
    _log.debug("a tool or reward raised", exc_info=error)
    return CallFailure(" ".join(traceback.format_exception_only(error)[-1].split()), user_code_location(error))


_threads = DaemonThreads("agent-r1-tool")
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _thread_slots() -> asyncio.Semaphore:
    """Return the semaphore of the running event loop: an asyncio semaphore cannot be shared between loops."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
