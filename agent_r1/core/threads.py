"""A thread that does one job after the other for an event loop, and whose death is noticed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from agent_r1.core.errors import EngineError

T = TypeVar("T")
Job = Callable[[], None]


class Worker:
    """Does jobs in the order they are given. An executor's thread that dies leaves everyone waiting for ever.

    The thread ends with ``close``, or when nobody holds the worker any more.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._gone = threading.Event()
        shared = (self._jobs, self._waiting, self._gone)
        threading.Thread(target=_work, args=shared, name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do ``work`` in the thread. Raises what it raises, EngineError where the thread is gone or goes meanwhile."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                outcome: tuple[T | None, BaseException | None] = (work(*arguments), None)
            except Exception as error:
                outcome = (None, error)
            _call(loop, settle, done, *outcome)

        self._waiting.add(done)
        try:
            self._jobs.put(job)
            if self._gone.is_set():  # asked after the job was put: either it sees this, or the thread sees the job
                raise _death()
            return await done
        finally:
            self._waiting.discard(done)

    def close(self) -> None:
        """End the thread after the job it is at; jobs that wait are not done."""
        self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None], waiting: set[asyncio.Future[Any]], gone: threading.Event) -> None:
    try:
        while (job := jobs.get()) is not None:
            job()
            del job  # it holds what it worked on, which would live until the next one comes
    finally:
        gone.set()
        for done in list(waiting):
            _call(done.get_loop(), settle, done, None, _death())


def _death() -> EngineError:
    return EngineError("the engine's thread is gone")


def _call(loop: asyncio.AbstractEventLoop, *work: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(*work)


def settle(done: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    """Answer a future that its waiter may have left."""
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
