"""Threads: order of jobs, exceptions, and a worker thread that ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from agent_r1.core.errors import EngineError
from agent_r1.core.threads import DaemonThreads, WorkerThread, run_in_thread


def test_jobs_run_in_order_in_one_other_thread() -> None:
    worker, order = WorkerThread("test"), list[int]()

    async def give() -> list[int]:
        return await asyncio.gather(
            *(worker.run(lambda n=n: order.append(n) or threading.get_ident()) for n in range(9))
        )

    threads = set(asyncio.run(give()))
    assert order == list(range(9)) and len(threads) == 1 and threading.get_ident() not in threads


def test_if_the_thread_ends_all_callers_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the thread is expected to end
    worker = WorkerThread("test", lambda: EngineError("the thread is gone"))

    def die() -> None:
        time.sleep(0.05)  # until the other callers wait
        raise SystemExit

    async def give() -> list[object]:
        async with asyncio.timeout(5):
            waiting = [worker.run(die), *(worker.run(lambda: 1) for _ in range(3))]
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            return [*errors, *await asyncio.gather(worker.run(lambda: 1), return_exceptions=True)]

    errors = asyncio.run(give())
    assert len(errors) == 5 and all(isinstance(error, EngineError) and "gone" in str(error) for error in errors)


def test_the_thread_keeps_no_arguments_alive_and_ends_with_its_object() -> None:
    class Heavy:
        pass

    heavy, worker = Heavy(), WorkerThread("ends with its worker")
    held = weakref.ref(heavy)
    asyncio.run(worker.run(lambda heavy: None, heavy))
    del heavy
    deadline = time.monotonic() + 120  # only bounds a hang
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert held() is None
    del worker
    gc.collect()
    while any(t.name == "ends with its worker" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "ends with its worker" for t in threading.enumerate())


def test_closing_with_wait_runs_the_jobs_before_it_and_fails_those_after_it() -> None:
    worker, order = WorkerThread("test"), list[int]()

    async def submit() -> None:
        before = asyncio.create_task(worker.run(order.append, 1))
        await asyncio.sleep(0)
        worker.close(wait_seconds=None)
        await before
        with pytest.raises(RuntimeError, match="'test' has ended"):
            await worker.run(order.append, 2)

    asyncio.run(submit())
    assert order == [1]


@pytest.mark.parametrize("pool", [None, DaemonThreads("pool")])
def test_run_in_thread_returns_the_result_or_raises(pool: DaemonThreads | None) -> None:
    def fail(error: BaseException) -> None:
        raise error

    async def submit() -> None:
        assert await run_in_thread(divmod, 7, 2, pool=pool) == (3, 1)
        for error, expected in (
            (KeyError("x"), KeyError),
            (SystemExit(3), SystemExit),
            (StopIteration(), RuntimeError),
        ):
            with pytest.raises(expected):
                await run_in_thread(fail, error, pool=pool)

    asyncio.run(submit())


class Heavy:
    """An object that stands for a tensor: what counts is which thread frees it."""


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that calls ``delivered`` in the thread that delivers an outcome, after the delivery."""

    delivered = staticmethod(lambda: None)

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            self.delivered()
        return handle


@pytest.mark.parametrize("kind", ["new thread", "pool", "worker"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_has_delivered_frees_nothing_of_the_work(kind: str, fails: bool) -> None:
    pool, worker = DaemonThreads("pool"), WorkerThread("worker")
    released, freed_by = threading.Event(), list[str]()

    def heavy() -> Heavy:
        made = Heavy()
        weakref.finalize(made, lambda: freed_by.append(threading.current_thread().name))
        return made

    class Work:
        def __init__(self) -> None:
            self.state = heavy()

        def run(self, argument: Heavy) -> Heavy:
            if fails:
                error = ValueError("failed")
                error.state = heavy()  # type: ignore[attr-defined]
                raise error
            return heavy()

    async def submit() -> None:
        # The thread is stopped right after its delivery, while the caller receives the outcome and drops everything.
        asyncio.get_running_loop().delivered = lambda: released.wait(60)  # type: ignore[attr-defined]
        work: Work | None = Work()
        argument: Heavy | None = heavy()
        run = {"worker": worker.run, "pool": partial(run_in_thread, pool=pool), "new thread": run_in_thread}[kind]
        waiting = asyncio.ensure_future(run(work.run, argument))
        del work, argument
        with pytest.raises(ValueError) if fails else nullcontext():
            await waiting
        del waiting
        gc.collect()

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(submit())
    gc.collect()
    assert freed_by == ["MainThread"] * 3
    released.set()
