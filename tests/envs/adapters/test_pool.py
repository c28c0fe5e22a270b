"""Processes that do the same work: what hangs, dies or raises costs its call, and the next one has a fresh process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agent_r1.envs.adapters.pool import WorkerPool
from agent_r1.tools.execution import CallFailure, CallOutcome, CallTimeout, ReturnValue

T = TypeVar("T")


class Worker:
    """What lives over there."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def die(self) -> None:
        os._exit(3)

    def fail(self) -> None:
        raise ValueError("no such answer")


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], WorkerPool]:
    """A pool of workers; this file is importable over there, under a name of its own."""
    folder = tmp_path_factory.mktemp("pool")
    (folder / "pool_worker.py").write_text(Path(__file__).read_text("utf-8"))
    monkeypatch.syspath_prepend(str(folder))
    return lambda seconds: WorkerPool("pool_worker", "pool_worker:Worker", seconds)


def run(*calls: Awaitable[T]) -> list[T]:
    async def one_by_one() -> list[T]:
        return [await call for call in calls]

    return asyncio.run(one_by_one())


def test_a_process_is_kept_and_its_object_with_it(made: Callable[[float], WorkerPool]) -> None:
    pool = made(20)
    assert run(pool.call("count"), pool.call("count")) == [ReturnValue(1), ReturnValue(2)]


def test_an_error_is_a_value_and_the_process_stays(made: Callable[[float], WorkerPool]) -> None:
    pool = made(20)
    first, failed, then = run(pool.call("count"), pool.call("fail"), pool.call("count"))
    assert (first, failed, then) == (ReturnValue(1), CallFailure("ValueError: no such answer"), ReturnValue(2))


def test_what_hangs_is_killed_and_what_dies_is_replaced(made: Callable[[float], WorkerPool]) -> None:
    pool = made(2)
    (mine,) = run(made(20).call("pid"))  # the import is paid before the clock runs

    async def calls() -> list[CallOutcome]:
        before = await pool.call("count")
        hung = await pool.call("sleep", 60)
        after = await pool.call("count")
        died = await pool.call("die")
        return [before, hung, after, died, await pool.call("count")]

    before, hung, after, died, last = asyncio.run(calls())
    assert isinstance(mine, ReturnValue) and mine.value != os.getpid()
    assert (before, hung, after, last) == (ReturnValue(1), CallTimeout(2), ReturnValue(1), ReturnValue(1))
    assert isinstance(died, CallFailure) and "ended" in died.reason


def test_no_more_calls_are_at_work_than_there_are_cores(made: Callable[[float], WorkerPool]) -> None:
    pool = made(20)

    async def all_at_once() -> list[CallOutcome]:
        return await asyncio.gather(*(pool.call("sleep", 0.02) for _ in range(20)))

    pids = {outcome.value for outcome in asyncio.run(all_at_once()) if isinstance(outcome, ReturnValue)}
    assert 1 <= len(pids) <= (os.cpu_count() or 1)


def test_a_call_that_is_cancelled_leaves_its_answer_to_nobody(made: Callable[[float], WorkerPool]) -> None:
    pool = made(20)

    async def cancelled() -> CallOutcome:
        await pool.call("count")
        call = asyncio.create_task(pool.call("sleep", 0.5))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await pool.call("count")

    assert isinstance(asyncio.run(cancelled()), ReturnValue)


def test_what_cannot_be_made_is_a_value(made: Callable[[float], WorkerPool]) -> None:
    (missing,) = run(WorkerPool("no_such_module", "no_such_module:X", 5).call("x"))
    assert isinstance(missing, CallFailure) and "no_such_module" in missing.reason
