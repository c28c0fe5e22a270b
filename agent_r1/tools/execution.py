"""Run functions of the user, sync or async, with a time limit and without blocking the event loop.

Sync functions run in daemon threads (:mod:`agent_r1.core.threads`). A thread cannot be stopped from outside, so the
thread of a function that exceeds its time limit is abandoned.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_r1.core.threads import DaemonThreads, run_in_thread

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_THREADS = 128
"""The largest number of sync functions that run at the same time in one event loop. Further calls wait."""

DEFAULT_TIMEOUT = 60.0
"""The default time limit of a tool or a reward, in seconds."""

PACKAGE_FOLDER, PYTHON_FOLDER = Path(__file__).parents[1], Path(os.__file__).parent

GRACE_SECONDS = 0.5
"""The time that cancelled code has for its cleanup, in seconds. Code that still runs after this time is abandoned."""


@dataclass(frozen=True, slots=True)
class ReturnValue:
    value: object


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The outcome of a function that raised an exception."""

    reason: str  # the exception in one line, such as ``ValueError: no such page``
    location: str = ""  # see :func:`user_code_location`. The policy does not see it


@dataclass(frozen=True, slots=True)
class CallTimeout:
    seconds: float


CallOutcome = ReturnValue | CallFailure | CallTimeout


async def run_with_timeout(work: Callable[[], object], timeout: float) -> CallOutcome:
    """Run ``work``, a sync or async function, and return its outcome. An exception or a timeout is also an outcome.

    Only a cancellation of the caller, a KeyboardInterrupt, and the GeneratorExit at the end of the event loop are
    raised. The time limit of ``timeout`` seconds begins when ``work`` starts. An async function that blocks the event
    loop cannot be stopped.
    """
    # Each event loop has a semaphore of its own, because event loops cannot share an asyncio semaphore.
    slots = _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
    async with nullcontext() if inspect.iscoroutinefunction(work) else slots:
        scope, task = asyncio.timeout(timeout), current_task()
        try:
            async with scope:
                return await run_detached(_run(work))
        except BaseException as error:
            if not is_user_error(error, task):
                raise
            return CallTimeout(timeout) if scope.expired() else _describe(error)


def current_task() -> asyncio.Task[object] | None:
    """Return the running asyncio task, or None, also if no event loop runs."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_user_error(error: BaseException, task: asyncio.Task[object] | None) -> bool:
    """Return whether user code raised ``error``. ``error`` was caught in the asyncio task ``task``.

    The result is False for a cancellation of ``task``, for a KeyboardInterrupt, and for the GeneratorExit at the end of
    the event loop.
    """
    match error:
        case asyncio.CancelledError():
            return task is not None and not task.cancelling()
        case GeneratorExit():  # the event loop closes a coroutine outside of its task
            return current_task() is task
    return not isinstance(error, KeyboardInterrupt)


def user_code_location(error: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback, such as " (env.py:12, in find)", or ""."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        own = file.is_relative_to(PACKAGE_FOLDER) or file.is_relative_to(PYTHON_FOLDER)
        if not own and "site-packages" not in file.parts and file.is_file():
            return f" ({file.name}:{line}, in {frame.f_code.co_name})"
    return ""


async def run_detached(work: Awaitable[T]) -> T:
    """Run ``work`` in an asyncio task of its own. Return the result of ``work``, or raise its exception.

    If the caller is cancelled, ``work`` is also cancelled. If ``work`` then does not end within ``GRACE_SECONDS``, it
    is abandoned.
    """
    task = asyncio.create_task(_capture(work))
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
    error: BaseException


async def _capture(work: Awaitable[T]) -> T | _CapturedError:
    # The error is a result of the asyncio task: a SystemExit that a task raises ends the event loop, and an error that
    # nobody awaits, because the caller was cancelled, is logged.
    try:
        return await work
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _CapturedError(error)


async def _run(work: Callable[[], object]) -> CallOutcome:
    def job() -> CallOutcome:
        try:
            return ReturnValue(work())
        except BaseException as error:  # also SystemExit, which cannot end the process from a thread
            return _describe(error)

    is_async = inspect.iscoroutinefunction(work)
    outcome = ReturnValue(work()) if is_async else await run_in_thread(job, pool=_threads)
    if isinstance(outcome, ReturnValue) and inspect.isawaitable(outcome.value):
        return ReturnValue(await outcome.value)
    return outcome


def _describe(error: BaseException) -> CallFailure:
    _log.debug("a tool or reward raised", exc_info=error)
    return CallFailure(" ".join(traceback.format_exception_only(error)[-1].split()), user_code_location(error))


_threads = DaemonThreads("agent-r1-tool")
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


BatchFunction = Callable[[list[dict[str, Any]]], Any]
"""A sync or async function: the keyword arguments of each call -> a list with the outputs in the same order."""

MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class _PendingCall:
    order: tuple[int, ...]
    arguments: dict[str, Any]
    timeout: float
    outcome: asyncio.Future[CallOutcome]


@dataclass(slots=True)
class _Queue:
    pending: list[_PendingCall] = field(default_factory=list)
    consumer: asyncio.Task[None] | None = None


class CallBatcher:
    """A batcher, which collects the calls of one tool and executes them in batches, one batch at a time.

    Calls that arrive while a batch is running wait for a later batch. A batch has at most ``MAX_BATCH`` calls.
    """

    def __init__(self, batch: BatchFunction) -> None:
        self._batch = batch
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    async def run(self, arguments: dict[str, Any], order: tuple[int, ...], timeout: float) -> CallOutcome:
        """Return the outcome of the call when its batch has run.

        The first ``MAX_BATCH`` waiting calls, sorted by ``order``, are the next batch. The time limit of a batch is the
        largest ``timeout`` of its calls, in seconds.
        """
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(loop, _Queue())
        call = _PendingCall(order, arguments, timeout, loop.create_future())
        queue.pending.append(call)
        if queue.consumer is None:
            queue.consumer = asyncio.create_task(self._consume(queue))
        return await call.outcome

    async def _consume(self, queue: _Queue) -> None:
        batch: list[_PendingCall] = []
        try:
            while queue.pending:
                # A call whose episode was cancelled has a cancelled future.
                pending = [call for call in queue.pending if not call.outcome.done()]
                pending.sort(key=lambda call: call.order)
                batch, queue.pending = pending[:MAX_BATCH], pending[MAX_BATCH:]
                if batch:
                    timeout = max(call.timeout for call in batch)
                    _resolve(batch, await self._execute([call.arguments for call in batch], timeout))
        finally:
            queue.consumer = None
            # Calls without an outcome remain only if this task was cancelled. Their callers must not wait forever.
            rest = (*batch, *queue.pending)
            _resolve(rest, [CallFailure("its batch was given up")] * len(rest))

    async def _execute(self, calls: list[dict[str, Any]], timeout: float) -> list[CallOutcome]:
        outcome = await run_with_timeout(partial(self._batch, calls), timeout)
        if isinstance(outcome, ReturnValue):
            outputs = outcome.value
            if isinstance(outputs, list | tuple) and len(outputs) == len(calls):
                return [ReturnValue(output) for output in outputs]
            reason = f"the batched form did not return a list with one output for each of {len(calls)} calls"
            outcome = CallFailure(reason)
        if isinstance(outcome, CallFailure) and len(calls) > 1:  # find the call that made the batch fail
            return [(await self._execute([call], timeout))[0] for call in calls]
        return [outcome] * len(calls)


def _resolve(calls: Sequence[_PendingCall], outcomes: Sequence[CallOutcome]) -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        if not call.outcome.done():
            call.outcome.set_result(outcome)
