"""A pool of worker processes: one per core, reused while they respond, killed if they hang."""

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
    """The idle processes of one event loop, and the limit on concurrent calls."""

    idle: list[WorkerProcess] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(os.cpu_count() or 1))


class WorkerPool:
    """Calls the methods of an object that lives in worker processes; see :func:`processes.start_process`.

    If a call times out or its process crashes, that call fails, and the next one gets a fresh process.

    Args:
        package: imported once, before the processes are forked.
        name: ``module:class`` of the object, which is created in each process.
        seconds: the time limit for creating the object, and for one call.

    Example:
        pool = WorkerPool("statistics", "statistics:NormalDist", seconds=5)
        await pool.call("cdf", 0.0)         # ReturnValue(0.5)
    """

    def __init__(self, package: str, name: str, seconds: float) -> None:
        self._package, self._name, self._seconds = package, name, seconds
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    async def call(self, method: str, *arguments: Any) -> CallOutcome:
        """Call a method and return the outcome. The arguments must be JSON values. Waiting for a slot is not timed."""
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
