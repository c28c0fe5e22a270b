"""Blocking work in daemon threads, awaited from an event loop.

Executors of the standard library wait for their threads when the process exits, so that one call that hangs keeps the
process alive. Daemon threads do not. No thread can be stopped from outside: if the caller is cancelled, the work
continues and its result is dropped.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Outcome = tuple["asyncio.Future[Any]", object, BaseException | None]
"""A future, and the result or the error that it is to be given."""


class DaemonThreads:
    """A pool of daemon threads without an upper bound: a job takes an idle thread, or starts a new one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


async def run_in_thread(work: Callable[..., T], *arguments: object, pool: DaemonThreads | None = None) -> T:
    """Return ``work(*arguments)``, computed in a thread of ``pool``, or in a new thread. Raises what ``work`` raises.

    A new thread shares no thread-local state, such as torch's gradient mode, with earlier work.

    Example:
        report = await run_in_thread(updater.update, groups)
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def job() -> None:
        try:
            outcome: Outcome = (future, work(*arguments), None)
        except BaseException as error:  # SystemExit too: otherwise the caller would wait forever
            outcome = (future, None, error)
        _resolve([outcome])

    if pool is None:
        threading.Thread(target=job, name="work", daemon=True).start()
    else:
        pool.submit(job)
    return await future


class WorkerThread:
    """One daemon thread that runs jobs in the order in which they are submitted.

    If the thread ends, with ``close`` or because a job raised SystemExit, every caller that waits and every later
    caller gets the exception that ``ended`` returns. The thread also ends when the last reference to this object does.
    """

    def __init__(self, name: str, ended: Callable[[], Exception] | None = None) -> None:
        self._ended = ended or (lambda: RuntimeError(f"the thread {name!r} has ended"))
        self._jobs: SimpleQueue[Callable[[], Outcome] | None] = SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._gone = threading.Event()
        state = (self._jobs, self._waiting, self._gone, self._ended)  # not self: the thread must not keep it alive
        self._thread = threading.Thread(target=_run_jobs, args=state, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return ``work(*arguments)``, computed in the thread. Raises what ``work`` raises."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> Outcome:
            try:
                return future, work(*arguments), None
            except Exception as error:
                return future, None, error

        self._waiting.add(future)
        try:
            self._jobs.put(job)
            # Checked after the put: if the thread ended before it saw the job, this line sees that it has.
            if self._gone.is_set():
                raise self._ended()
            return await future
        finally:
            self._waiting.discard(future)

    def close(self, *, wait: bool = False) -> None:
        """End the thread after the jobs submitted so far; with ``wait``, return when it has ended."""
        self._jobs.put(None)
        if wait:
            self._thread.join()


def _run_jobs(
    jobs: SimpleQueue[Callable[[], Outcome] | None],
    waiting: set[asyncio.Future[Any]],
    gone: threading.Event,
    ended: Callable[[], Exception],
) -> None:
    outcomes: list[Outcome] = []
    closed = False
    try:
        while not closed:
            # Jobs that wait together are resolved with one wake-up of the event loop: with one each, hundreds of
            # callers would compete with this thread for the interpreter.
            batch = [jobs.get()]
            batch += [jobs.get() for _ in range(jobs.qsize())]
            for job in batch:
                if job is None:
                    closed = True
                else:
                    outcomes.append(job())
            _resolve(outcomes)
            batch, job, outcomes = [], None, []  # jobs refer to their arguments, which would live until the next job
    finally:
        gone.set()
        _resolve([*outcomes, *((future, None, ended()) for future in list(waiting))])


def _resolve(outcomes: Iterable[Outcome]) -> None:
    """Give futures their outcomes, from any thread, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
    for loop, mine in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(_settle_all, mine)


def _settle_all(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        settle(*outcome)


def settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    """Give a future its result or its error, unless it is done, for example because its caller was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # asyncio refuses to put it into a future
        future.set_exception(RuntimeError(f"the work raised {error!r}"))
    else:
        future.set_exception(error)
