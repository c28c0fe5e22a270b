"""Tools that raise, hang or are cancelled: failures are shown to the agent and not raised."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from running_tools import failure, run, text_of

from agent_r1.core.task import Task
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Panic(BaseException):
    """An exception such as libraries in other languages raise."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such page"),
        Unprintable(),
        SystemExit(3),
        StopIteration(1),
        RecursionError(),
        Panic("in Rust"),
        GeneratorExit(),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_of_a_tool_is_shown_to_the_agent(
    error: BaseException, is_async: bool, task: Task, context: Any
) -> None:
    def sync_form() -> str:
        """Fail."""
        raise error

    async def async_form() -> str:
        """Fail."""
        raise error

    kind, text = failure(tool(name="fail")(async_form if is_async else sync_form), {}, task, context())
    assert kind == ToolErrorKind.RAISED
    assert text.startswith("fail failed: ")
    assert is_async or type(error).__name__ in text


def test_a_timeout_error_raised_by_a_tool_is_an_exception_of_the_tool(task: Task, context: Any) -> None:
    @tool
    async def fetch() -> str:
        """Fetch."""
        raise TimeoutError("the server is slow")

    assert failure(fetch, {}, task, context()) == (
        ToolErrorKind.RAISED,
        "fetch failed: TimeoutError: the server is slow",
    )


def test_a_tool_that_cancels_itself_has_failed(task: Task, context: Any) -> None:
    @tool
    async def fetch() -> str:
        """Fetch."""
        raise asyncio.CancelledError

    assert failure(fetch, {}, task, context())[0] == ToolErrorKind.RAISED


def test_an_interrupt_by_a_signal_is_no_failure_of_the_tool(task: Task, context: Any) -> None:
    @tool
    async def press_ctrl_c() -> str:
        """Interrupt this process twice, as an impatient user does."""
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return "nothing happened"

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(press_ctrl_c.run({}, task, context()))


@tool
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


@tool
async def async_sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


@pytest.mark.parametrize("slow", [sleep, async_sleep])
def test_a_slow_tool_is_stopped_in_time(slow: Tool, task: Task, context: Any) -> None:
    kind, text = failure(slow, {"seconds": 3600}, task, context(), timeout=0.05)
    assert kind == ToolErrorKind.TIMED_OUT
    assert "0.05 seconds" in text
    assert run(slow, {"seconds": 0.01}, task, context(), timeout=600.0).ok  # the control: with more time it succeeds


def test_a_tool_that_swallows_its_cancellation_is_abandoned(task: Task, context: Any) -> None:
    @tool
    async def retrying() -> str:
        """Try, and try again."""
        for _ in range(2):  # the second cancellation is that of the event loop's end
            try:
                await asyncio.sleep(3600)
            except BaseException:  # as a bare except does
                await asyncio.sleep(0)
        return "at last"

    assert failure(retrying, {}, task, context(), timeout=0.05)[0] == ToolErrorKind.TIMED_OUT


def test_slow_sync_tools_do_not_block_the_event_loop(task: Task, context: Any) -> None:
    all_running, released = threading.Barrier(21), threading.Event()

    @tool
    def wait() -> bool:
        """Wait for all others, and then for the event loop."""
        all_running.wait(60)
        return released.wait(60)

    async def all_at_once() -> list[str]:
        waiting = asyncio.gather(*(wait.run({}, task, context(i)) for i in range(20)))
        await asyncio.to_thread(all_running.wait, 60)
        released.set()
        return [text_of(result) for result in await waiting]

    assert asyncio.run(all_at_once()) == ["true"] * 20


def test_a_cancellation_of_the_episode_is_raised(task: Task, context: Any) -> None:
    async def cancel(made: Tool) -> None:
        running = asyncio.create_task(made.run({"seconds": 0.5}, task, context()))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    for made in (sleep, async_sleep):
        asyncio.run(cancel(made))


def test_a_hung_tool_does_not_keep_the_process_alive() -> None:
    program = """
import asyncio, time
from agent_r1.core.trajectory import AttemptId
from agent_r1.core.task import Task
from agent_r1.core.environment import RolloutContext
from agent_r1 import tool

@tool
def hang() -> str:
    "Hang."
    time.sleep(600)

result = asyncio.run(hang.run({}, Task("t", ()), RolloutContext(AttemptId("r", "t", 0, 0), 0), 0.1))
print(result.error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=600)
    assert (done.returncode, done.stdout.strip()) == (0, "timed out")


def test_hung_threads_are_replaced(task: Task, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.tools.execution.MAX_THREADS", 2)

    async def hang_then_work() -> list[str]:
        calls = [sleep.run({"seconds": 3600.0 if i < 4 else 0.0}, task, context(i), 1.0) for i in range(6)]
        return [text_of(result) for result in await asyncio.gather(*calls)]

    texts = asyncio.run(hang_then_work())
    assert [text == "slept" for text in texts] == [False] * 4 + [True] * 2
