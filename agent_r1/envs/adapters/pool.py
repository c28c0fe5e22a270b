"""A pool with at most one worker process per CPU core."""

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
class _LoopState:
    idle: list[WorkerProcess] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(os.cpu_count() or 1))


class WorkerPool:
    """A pool of worker processes. Each process holds an object of the same class.

    If a call times out or its process crashes, the call fails, and a later call starts a new process.

    Args:
        package: the name of a module. The module is imported once, before the processes are forked.
        name: the class of the objects, as ``module:class``.
        seconds: the time limit of each call, and also for creating an object.

    Example:
        pool = WorkerPool("statistics", "statistics:NormalDist", seconds=5)
        await pool.call("cdf", 0.0)         # ReturnValue(0.5)
    """

    def __init__(self, package: str, name: str, seconds: float) -> None:
        self._package, self._name, self._seconds = package, name, seconds
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    async def call(self, method: str, *arguments: Any) -> CallOutcome:
        """Call a method of the object that a free process holds. Return a value, a failure or a timeout.

        ``method`` is the name of the method. The arguments must be JSON values. Waiting for a free process does not
        count towards the time limit.
        """
        state = self._states.setdefault(asyncio.get_running_loop(), _LoopState())
        async with state.slots:
            try:
                process = (
                    state.idle.pop()
                    if state.idle
                    else await start_process(self._package, self._name, {}, self._seconds)
                )
            except AgentR1Error as error:
                return CallFailure(str(error))
            try:
                outcome = await process.call(method, *arguments, timeout=self._seconds)
            except BaseException:
                await process.kill()
                raise
            if process.alive:
                state.idle.append(process)
            return outcome
