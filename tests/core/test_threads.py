"""The engine's thread does jobs in order, tells what they raise, and does not die in silence."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from agent_r1.core.errors import EngineError
from agent_r1.core.threads import WorkerThread


def test_jobs_are_done_in_order_in_one_other_thread() -> None:
    worker, seen = WorkerThread("test"), list[int]()

    async def give() -> list[int]:
        return await asyncio.gather(
            *(worker.run(lambda n=n: seen.append(n) or threading.get_ident()) for n in range(9))
        )

    threads = set(asyncio.run(give()))
    assert seen == list(range(9)) and len(threads) == 1 and threading.get_ident() not in threads


def test_what_a_job_raises_is_told_and_the_next_one_is_done() -> None:
    worker = WorkerThread("test")

    async def give() -> int:
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        return await worker.run(lambda: 7)

    assert asyncio.run(give()) == 7


def test_a_thread_that_dies_is_told_to_who_waits_and_to_who_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # it is meant to die
    worker = WorkerThread("test", lambda: EngineError("the thread is gone"))

    def die() -> None:
        time.sleep(0.05)  # the others are waiting by then
        raise SystemExit

    async def give() -> list[object]:
        async with asyncio.timeout(5):
            waiting = [worker.run(die), *(worker.run(lambda: 1) for _ in range(3))]
            told = await asyncio.gather(*waiting, return_exceptions=True)
            return [*told, *await asyncio.gather(worker.run(lambda: 1), return_exceptions=True)]

    told = asyncio.run(give())
    assert len(told) == 5 and all(isinstance(error, EngineError) and "gone" in str(error) for error in told)


def test_the_thread_ends_with_its_worker_and_keeps_nothing_alive() -> None:
    class Heavy:
        pass

    heavy, worker = Heavy(), WorkerThread("ends with its worker")
    held = weakref.ref(heavy)
    asyncio.run(worker.run(lambda heavy: None, heavy))
    del heavy
    deadline = time.monotonic() + 5
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert held() is None
    del worker
    gc.collect()
    while any(t.name == "ends with its worker" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "ends with its worker" for t in threading.enumerate())
