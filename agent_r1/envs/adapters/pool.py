"""Processes that do the same work: as many as there are cores, kept while they answer, killed when they hang."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.core.errors import AgentR1Error
from agent_r1.envs.adapters.processes import WorkerProcess, start_process
from agent_r1.tools.execution import CallFailure, CallOutcome


@dataclass(slots=True)
class _Kept:
    """The processes of one event loop that nobody is asking, and how many may be asked at the same time."""

    free: list[WorkerProcess] = field(default_factory=list)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(os.cpu_count() or 1))


class WorkerPool:
    """Calls the methods of an object that lives in processes of its own; see :func:`processes.start`.

    A process that takes too long or dies costs its call; the next one has a fresh process.

    Args:
        package: what is imported once, before processes are forked.
        name: ``module:class``, the object in each of them.
        seconds: what making the object, and one call, may take.

    Example:
        pool = WorkerPool("statistics", "statistics:NormalDist", seconds=5)
        await pool.call("cdf", 0.0)         # Returned(0.5)
    """

    def __init__(self, package: str, name: str, seconds: float) -> None:
        self._package, self._name, self._seconds = package, name, seconds
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Kept] = WeakKeyDictionary()

    async def call(self, method: str, *arguments: Any) -> CallOutcome:
        """Call a method with arguments that JSON can hold; what goes wrong is a value. Waiting takes no time."""
        kept = self._of_loop.setdefault(asyncio.get_running_loop(), _Kept())
        async with kept.places:
            try:
                process = kept.free.pop() if kept.free else await self._new()
            except AgentR1Error as error:
                return CallFailure(str(error))
            try:
                outcome = await process.call(method, *arguments, timeout=self._seconds)
            except BaseException:
                await process.end()
                raise
            if process.alive:
                kept.free.append(process)
            return outcome

    async def _new(self) -> WorkerProcess:
        return await start_process(self._package, self._name, {}, self._seconds)
