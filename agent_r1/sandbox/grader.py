"""Grade a candidate (untrusted code with functions) so that the candidate cannot forge the verdict.

The tests and the candidate run in two sandboxed processes that exchange only plain data. The candidate's process never
gets the tests. A candidate passes only if the tests' process ends its output with the nonce: a secret random number,
new for each run.

Some values cannot be sent to the candidate's process unchanged. If the tests call a function with such a value, the
candidate is neither passed nor failed: :attr:`Verdict.passed` is None. The tests may use a result of the candidate as
an argument of a later call. Every result that the tests receive can be sent back unchanged. So the candidate cannot
cause the verdict None by returning an unusual value.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus, Verdict, run_program

_WORKER = (Path(__file__).parent / "inside" / "grader_worker.py").read_text()


async def grade(confinement: Confinement, candidate: str, tests: str, calls: Sequence[str], setup: str) -> Verdict:
    """Run the tests and the candidate's code in two processes, and return the verdict.

    The limits in ``confinement`` apply to each process. For the other arguments, see :meth:`Sandbox.grade`.
    """
    nonce = secrets.token_hex(16)
    tests_end, candidate_end = socket.socketpair()
    with tests_end, candidate_end:
        serve = f"{_WORKER}\nserve({candidate_end.fileno()}, {candidate!r})"
        run_tests = f"{_WORKER}\nrun_tests({tests_end.fileno()}, {setup!r}, {tests!r}, {tuple(calls)!r}, {nonce!r})"
        serving = asyncio.create_task(run_program(confinement, serve, connection=candidate_end))
        try:
            result = await run_program(confinement, run_tests, connection=tests_end)
            if result.ok and result.stderr.data.endswith(nonce.encode()):
                return Verdict(True)
            _, separator, reason = result.stderr.text.rpartition(f"{nonce} ")
            if separator:
                return Verdict(None, reason)
            return _failed_verdict(result, await serving)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def _failed_verdict(tests: ExecutionResult, candidate: ExecutionResult) -> Verdict:
    # ``passed`` is None if a process could not start, otherwise False.
    for result in (candidate, tests):
        if result.status is ExecutionStatus.NOT_STARTED:
            return Verdict(None, result.error)
    failed = tests if candidate.ok else candidate
    reason = failed.error.strip().splitlines()[-1:] or ["the tests did not reach their end"]
    return Verdict(False, reason[0])
