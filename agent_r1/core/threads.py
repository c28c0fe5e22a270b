"""Blocking work in daemon threads, whose results an event loop awaits.

When the process exits, it does not wait for daemon threads. Executors of the standard library wait for their threads,
so one call that never returns would keep the process alive. Python cannot stop a thread from outside: if the caller is
cancelled, the work in the thread continues, and its result is dropped.
"""

# A daemon thread must not free a tensor while the process exits: PyTorch would abort the process. So a thread that has
# delivered a result keeps no reference to the work, its arguments or its result. They are freed in the caller's thread.

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Outcome = tuple["asyncio.Future[Any]", object, BaseException | None]
"""A future, its result, and its error. The error is None if the work succeeded."""

CLOSE_SECONDS = 60.0


class DaemonThreads:
    """A pool of daemon threads without a size limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a thread of the pool, without waiting for its end. ``job`` must not raise an exception."""
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
    """Run ``work(*arguments)`` in a thread of ``pool``, and return its result or raise its exception.

    If ``pool`` is None, the thread is new, so it shares no thread-local state, such as torch's gradient mode, with
    earlier work.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    # Catch SystemExit, too: otherwise the caller would wait forever.
    run = _job(future, work, arguments, BaseException)

    def job() -> None:
        _resolve([run()])

    if pool is None:
        threading.Thread(target=job, name="work", daemon=True).start()
    else:
        pool.submit(job)
    return await future


def _job(
    future: asyncio.Future[T], work: Callable[..., T], arguments: Sequence[object], catch: type[BaseException]
) -> Callable[[], _Outcome]:
    def job() -> _Outcome:
        nonlocal future, work, arguments
        try:
            outcome: _Outcome = (future, work(*arguments), None)
        except catch as error:
            outcome = (future, None, error)
        del future, work, arguments
        return outcome

    return job


class WorkerThread:
    """A daemon thread that runs jobs one after another, in the order in which they are submitted.

    The thread ends after ``close``, after a job that raises SystemExit, or when this object is deleted. Then all calls
    of ``run``, also those that already wait, raise the exception that ``ended`` returns, by default a RuntimeError.
    """

    def __init__(self, name: str, ended: Callable[[], Exception] | None = None) -> None:
        self._ended = ended or (lambda: RuntimeError(f"the thread {name!r} has ended"))
        self._jobs: SimpleQueue[Callable[[], _Outcome] | None] = SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._gone = threading.Event()
        state = (self._jobs, self._waiting, self._gone, self._ended)  # not self, which the thread would keep alive
        self._thread = threading.Thread(target=_run_jobs, args=state, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run ``work(*arguments)`` in the thread, and return its result or raise its exception."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            self._jobs.put(_job(future, work, arguments, Exception))
            # If the thread ends, it sets _gone, and then resolves the futures in _waiting. This future was added to
            # _waiting before the check of _gone, so the caller never waits forever.
            if self._gone.is_set():
                raise self._ended()
            return await future
        finally:
            self._waiting.discard(future)

    def close(self, *, wait_seconds: float | None = 0) -> None:
        """End the thread after all submitted jobs, and wait at most ``wait_seconds`` (None: no limit) for its end."""
        self._jobs.put(None)
        self._thread.join(wait_seconds)

    async def close_and_wait(self) -> None:
        """End the thread after all submitted jobs, and wait at most ``CLOSE_SECONDS`` for its end."""
        await run_in_thread(lambda: self.close(wait_seconds=CLOSE_SECONDS))


def _run_jobs(
    jobs: SimpleQueue[Callable[[], _Outcome] | None],
    waiting: set[asyncio.Future[Any]],
    gone: threading.Event,
    ended: Callable[[], Exception],
) -> None:
    outcomes: list[_Outcome] = []
    closed = False
    try:
        while not closed:
            # The results of jobs that wait together are delivered with one wake-up of the event loop. With one wake-up
            # per job, hundreds of callers would compete with this thread for the interpreter.
            batch = [jobs.get()]
            batch += [jobs.get() for _ in range(jobs.qsize())]
            for job in batch:
                if job is None:
                    closed = True
                else:
                    outcomes.append(job())
            _resolve(outcomes)
    finally:
        gone.set()
        _resolve([*outcomes, *((future, None, ended()) for future in list(waiting))])


def _resolve(outcomes: list[_Outcome]) -> None:
    loops = {outcome[0].get_loop() for outcome in outcomes}
    by_loop = {loop: [outcome for outcome in outcomes if outcome[0].get_loop() is loop] for loop in loops}
    outcomes.clear()
    for loop, mine in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(_settle_all, mine)


def _settle_all(outcomes: list[_Outcome]) -> None:
    outcomes.reverse()
    while outcomes:
        settle(*outcomes.pop())


def settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # for example because its caller was cancelled
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # asyncio does not accept this exception in a future
        future.set_exception(RuntimeError(f"the work raised {error!r}"))
    else:
        future.set_exception(error)
