"""A Python that keeps its variables between calls, for as long as it lives."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agent_r1.sandbox.concurrency import slot
from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.process import SandboxProcess, start_process
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus


class Interpreter:
    """Runs cells one after the other in one process, started with the first. Close it.

    A cell that takes too long, or that ends the process, costs that call: the next one begins in a fresh
    process, without the variables, and its outcome says ``restarted``.

    Example:
        interpreter = sandbox.interpreter()
        await interpreter.run("x = 6")
        (await interpreter.run("x * 7")).stdout.text == "42\\n"
        await interpreter.close()
    """

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._process: SandboxProcess | None = None
        self._lost = self._closed = False
        self._line = asyncio.Lock()

    async def run(self, source: str) -> ExecutionResult:
        """Run one cell; the value of its last expression is printed. Calls at the same time run in their order."""
        async with self._line, slot():
            if self._closed:
                return ExecutionResult(ExecutionStatus.NOT_STARTED, error="this interpreter was closed")
            if self._process is None:
                started = await start_process(self._confinement)
                if isinstance(started, ExecutionResult):
                    return started
                self._process = started
            restarted, self._lost = self._lost, True  # until the call came back: it may be cancelled
            outcome = await self._call(self._process, source)
            self._lost = not outcome.alive
            return replace(outcome, restarted=restarted)

    async def close(self) -> None:
        """Kill the process and all it started."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # a call that is at work then comes back at once
        async with self._line:
            if self._process is not None:
                await self._process.close()
                self._process = None

    async def _call(self, process: SandboxProcess, source: str) -> ExecutionResult:
        keep = False
        try:
            outcome = await process.call("cell", source)
            keep = outcome.alive
            return outcome
        finally:
            if not keep and self._process is process:
                self._process = None
                await process.close()
