"""Worker pools: a call that hangs, crashes or raises fails alone, and the next one has a fresh process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agent_r1.envs.processes import ProcessPool
from agent_r1.tools.execution import CallFailure, CallOutcome, CallTimeout, ReturnValue

T = TypeVar("T")


class Worker:
    """The object in the worker processes."""

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
def made(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], ProcessPool]:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "pool_worker.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return lambda seconds: ProcessPool("pool_worker", "pool_worker:Worker", seconds)


def run(*calls: Awaitable[T]) -> list[T]:
    async def one_by_one() -> list[T]:
        return [await call for call in calls]

    return asyncio.run(one_by_one())


def test_a_process_and_its_object_are_reused(made: Callable[[float], ProcessPool]) -> None:
    pool = made(20)
    assert run(pool.call("count"), pool.call("count")) == [ReturnValue(1), ReturnValue(2)]


def test_an_exception_becomes_a_value_and_the_process_is_reused(made: Callable[[float], ProcessPool]) -> None:
    pool = made(20)
    first, failed, then = run(pool.call("count"), pool.call("fail"), pool.call("count"))
    assert (first, failed, then) == (ReturnValue(1), CallFailure("ValueError: no such answer"), ReturnValue(2))


def test_a_process_that_hangs_or_crashes_is_replaced(made: Callable[[float], ProcessPool]) -> None:
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


def test_concurrent_calls_are_limited_to_the_number_of_cores(made: Callable[[float], ProcessPool]) -> None:
    pool = made(20)

    async def all_at_once() -> list[CallOutcome]:
        return await asyncio.gather(*(pool.call("sleep", 0.02) for _ in range(20)))

    pids = {outcome.value for outcome in asyncio.run(all_at_once()) if isinstance(outcome, ReturnValue)}
    assert 1 <= len(pids) <= (os.cpu_count() or 1)


def test_the_answer_to_a_cancelled_call_is_discarded(made: Callable[[float], ProcessPool]) -> None:
    pool = made(20)

    async def cancelled() -> CallOutcome:
        await pool.call("count")
        call = asyncio.create_task(pool.call("sleep", 0.5))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await pool.call("count")

    assert isinstance(asyncio.run(cancelled()), ReturnValue)


def test_an_object_that_cannot_be_created_becomes_a_value(made: Callable[[float], ProcessPool]) -> None:
    (missing,) = run(ProcessPool("no_such_module", "no_such_module:X", 5).call("x"))
    assert isinstance(missing, CallFailure) and "no_such_module" in missing.reason
