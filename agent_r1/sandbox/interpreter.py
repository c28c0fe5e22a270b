"""A Python interpreter that keeps its variables between calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agent_r1.sandbox.concurrency import slot
from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.process import SandboxProcess, start_process
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus


class Interpreter:
    """An interpreter that runs pieces of code (cells) in one process. The caller has to close it.

    The process starts with the first cell. A cell fails if it times out or ends the process. Then the next call starts
    a fresh process without the earlier variables, and ``restarted`` is True in the result of this call.

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
        self._lock = asyncio.Lock()

    async def run(self, source: str) -> ExecutionResult:
        """Run source code as one cell, and print the value of its last expression. Concurrent calls run one after
        another.
        """
        async with self._lock, slot():
            if self._closed:
                return ExecutionResult(ExecutionStatus.NOT_STARTED, error="this interpreter was closed")
            if self._process is None:
                process = await start_process(self._confinement)
                if isinstance(process, ExecutionResult):
                    return process
                self._process = process
            # ``_lost`` is True until the call returns, because a cancelled call loses the process.
            restarted, self._lost = self._lost, True
            result = await self._call(self._process, source)
            self._lost = not result.alive
            return replace(result, restarted=restarted)

    async def close(self) -> None:
        """Kill the interpreter's process and all processes that it started."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # so that a running call returns immediately
        async with self._lock:
            if self._process is not None:
                await self._process.close()
                self._process = None

    async def _call(self, process: SandboxProcess, source: str) -> ExecutionResult:
        keep = False
        try:
            result = await process.call("cell", source)
            keep = result.alive
            return result
        finally:
            if not keep and self._process is process:
                self._process = None
                await process.close()
