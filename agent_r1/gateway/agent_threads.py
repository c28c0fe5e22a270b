"""Threads in which agents of users run: one event loop for all async agents, and one thread for each sync agent.

Agents never run in the event loop of the run, because this loop answers their requests.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from agent_r1.core.task import AgentFunction, Task
from agent_r1.core.tasks import shared_task
from agent_r1.core.threads import DaemonThreads, run_in_thread

log = logging.getLogger(__name__)

RESPONSE_SECONDS = 10.0
"""How long the agents' event loop may take to react after a cancellation, in seconds.

A loop that takes longer is blocked by an agent. Later calls then use a new event loop.
"""


class AgentThreads:
    def __init__(self) -> None:
        self._pool = DaemonThreads("agent")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: AgentFunction, base_url: str, key: str, task: Task) -> object:
        """Call an agent program, and return its result. Exceptions of the program are raised in the caller.

        ``base_url`` is the URL of the gateway, such as ``http://127.0.0.1:8123/v1``. ``key`` is the API key of the
        attempt.

        If the caller is cancelled, an async program is cancelled too. The thread of a sync program continues, and its
        result is ignored.
        """
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await self._await(function, base_url, key, task)
        result = await run_in_thread(function, base_url, key, task, pool=self._pool)
        return await self._await(_identity, result) if inspect.isawaitable(result) else result

    async def _await(self, function: Callable[..., Any], *arguments: object) -> object:
        if self._loop is None:
            self._loop = _start_loop()
        loop = self._loop
        result = asyncio.run_coroutine_threadsafe(_call(function, arguments), loop)
        try:
            return (await asyncio.wrap_future(result)).unwrap()
        except asyncio.CancelledError:
            shared_task(self._replace_if_blocked(loop))
            raise

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:  # replaced already, or stopped by close
            return
        response: Future[None] = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(response), RESPONSE_SECONDS)
        except TimeoutError:
            if self._loop is loop:
                log.warning("an agent blocks the event loop of all agents; later episodes get a new event loop")
                self._loop = None

    def close(self) -> None:
        """Stop the event loop of the async programs. Programs that still run are abandoned."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _Outcome:
    """The result or the exception of an async agent program. :meth:`unwrap` raises the exception in the caller."""

    # Raised in the programs' event loop, an exception such as SystemExit would stop the loop.

    def __init__(self, value: object, error: BaseException | None) -> None:
        self.value, self.error = value, error

    def unwrap(self) -> object:
        if self.error is not None:
            raise self.error
        return self.value


async def _call(function: Callable[..., Any], arguments: tuple[object, ...]) -> _Outcome:
    task = asyncio.current_task()
    assert task is not None
    try:
        return _Outcome(await function(*arguments), None)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            raise
        return _Outcome(None, error)


async def _identity(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="agents", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    # A SystemExit in a task ends only this task.
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except BaseException as error:
            log.warning("a task of an agent raised %s", type(error).__name__)
    loop.close()
