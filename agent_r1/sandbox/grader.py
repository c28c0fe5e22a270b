"""Verdicts that the judged cannot forge: tests and candidate run in two sandboxes, and only data passes between.

The candidate's process never sees the tests, only the arguments of calls. The tests' process never runs
the candidate's code, only compares what comes back, as plain data. It passes only where it says, at its very end, a
number drawn for this run; whatever is missing is a fail. What tests print themselves goes nowhere. Where they hand over
what would arrive as something else, the exam is at fault and there is no verdict: a candidate cannot bring that about,
as all that comes from it can be handed back.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.process import start_process
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus, Verdict

_EXAM = (Path(__file__).parent / "inside" / "grader_worker.py").read_text()


async def grade(confinement: Confinement, candidate: str, tests: str, calls: Sequence[str], setup: str) -> Verdict:
    """See :meth:`Sandbox.grade`. The limits hold for each of the two processes."""
    nonce = secrets.token_hex(16)
    examiner_line, candidate_line = socket.socketpair()
    with examiner_line, candidate_line:
        serves = f"{_EXAM}\nserve({candidate_line.fileno()}, {candidate!r})"
        asks = f"{_EXAM}\nexamine({examiner_line.fileno()}, {setup!r}, {tests!r}, {tuple(calls)!r}, {nonce!r})"
        judged = asyncio.create_task(_run(confinement, serves, candidate_line))
        try:
            examined = await _run(confinement, asks, examiner_line)
            examiner_line.close()
            if examined.status is ExecutionStatus.OK and examined.stderr.data.endswith(nonce.encode()):
                return Verdict(True)
            _, number, reason = examined.stderr.text.rpartition(f"{nonce} ")
            if number:
                return Verdict(None, reason)
            return _failed(examined, await judged)
        finally:
            judged.cancel()
            await asyncio.gather(judged, return_exceptions=True)


async def _run(confinement: Confinement, source: str, line: socket.socket) -> ExecutionResult:
    """Run one side; our copy of its end of the line is closed once it has its own."""
    process = await start_process(confinement, extra=(line.fileno(),))
    line.close()
    if isinstance(process, ExecutionResult):
        return process
    try:
        return await process.call("program", source)
    finally:
        await process.close()


def _failed(examined: ExecutionResult, judged: ExecutionResult) -> Verdict:
    """The candidate's own end, where that was early, explains more than what the tests saw of it."""
    for side in (judged, examined):
        if side.status is ExecutionStatus.NOT_STARTED:
            return Verdict(None, side.error)
    told = judged if judged.status is not ExecutionStatus.OK else examined
    last = told.error.strip().splitlines()[-1:] or ["the tests did not reach their end"]
    return Verdict(False, last[0])
