"""The sandbox, which runs Python programs written by a model."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from weakref import WeakSet

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.isolation import ALL_LAYERS, Confinement, IsolationLayer, pyseccomp
from agent_r1.sandbox.process import (
    ExecutionResult,
    ExecutionStatus,
    SandboxProcess,
    Verdict,
    clear_stale_cgroups,
    run_program,
    slot,
    start_process,
)

_WORKER = (Path(__file__).parent / "inside" / "grader_worker.py").read_text("utf-8")


async def grade(confinement: Confinement, candidate: str, tests: str, calls: Sequence[str], setup: str) -> Verdict:
    """Run the tests and the candidate's code in two processes, and return the verdict (see :meth:`Sandbox.grade`).

    The candidate's process never gets the tests. A candidate passes only if the tests' process ends its output with the
    nonce, a secret random number. If the tests call a function with a value that cannot be sent unchanged, the
    candidate is neither passed nor failed. But every result that the tests receive can be sent back unchanged, so the
    candidate cannot avoid a failure by returning an unusual value.
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
            served = await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    for ended in (served, result):
        if ended.status is ExecutionStatus.NOT_STARTED:
            return Verdict(None, ended.error)
    lines = (result if served.ok else served).error.strip().splitlines()
    return Verdict(False, lines[-1] if lines else "the tests did not reach their end")


class Interpreter:
    """An interpreter that runs pieces of code (cells) in one process. The caller has to close it.

    If a cell times out or ends the process, it fails, and the next call starts a fresh process without the earlier
    variables. Then ``restarted`` is True in the result of this call.
    """

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._process: SandboxProcess | None = None
        self._lost = self._closed = False
        self._lock = asyncio.Lock()

    async def run(self, source: str) -> ExecutionResult:
        """Run source code as one cell, and print the value of its last expression. Calls run one after another."""
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


_SOURCE = (Path(__file__).parent / "inside" / "probe.py").read_text("utf-8")
_LIMITS = Limits(seconds=10, memory=128 * 2**20, processes=8, disk=2**20, open_files=32)


def verify_isolation(config: SandboxConfig) -> frozenset[IsolationLayer]:
    """Test the isolation layers on this machine, and return the layers that work."""
    for folder in config.packages:
        if not folder.is_dir():
            raise InvalidInput("packages of the sandbox", got=f"{folder}, which is no folder", do="give folders")
    return frozenset() if config.level == "none" else _verify_machine()


@lru_cache(maxsize=1)
def _verify_machine() -> frozenset[IsolationLayer]:
    if sys.platform != "linux":
        raise refusal(f"{sys.platform}", "use Linux")
    if shutil.which("bwrap") is None:
        raise refusal("no program bwrap", "install bubblewrap (apt-get install bubblewrap)")
    if pyseccomp is None:
        raise refusal("no pyseccomp", "pip install 'agent-r1[sandbox]', and apt-get install libseccomp2")
    clear_stale_cgroups()
    with ThreadPoolExecutor(1) as thread:  # in a thread, because the caller can be inside an event loop
        broken = thread.submit(asyncio.run, find_broken_layers(ALL_LAYERS)).result()
    if required := broken - {IsolationLayer.CGROUP}:
        names = ", ".join(sorted(required))
        raise refusal(f"one that does not hold here: {names}", 'see docs/sandbox.md, "When it refuses"')
    return ALL_LAYERS - broken


def refusal(got: str, do: str) -> InvalidInput:
    accept = "or accept the risk with --sandbox none (in Python: SandboxConfig(level='none'))"
    return InvalidInput("sandbox 'bubblewrap'", got=got, do=f"{do}, {accept}")


async def find_broken_layers(layers: frozenset[IsolationLayer]) -> frozenset[IsolationLayer]:
    """Attack every isolation layer from a process that is isolated by ``layers``. Return the layers that do not hold.

    Raise InvalidInput if the probe does not run to its end.
    """
    with tempfile.TemporaryDirectory(prefix="agent-r1-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)  # so that only the layer, not a file permission, protects the secret
        secret = Path(folder, "secret")
        secret.write_text("secret", "utf-8")
        targets = _LIMITS.model_dump() | {"secret": str(secret), "port": server.getsockname()[1]}
        result = await run_program(Confinement(layers, _LIMITS), f"{_SOURCE}\nprobe({targets!r})")
    lines = dict(line.split() for line in result.stdout.text.splitlines())
    # The line of the cgroup can be missing: the kernel can kill the process in the attempt against the cgroup.
    for layer in ALL_LAYERS - {IsolationLayer.CGROUP}:
        if layer not in lines:
            reason = result.error.strip().splitlines()[-1:] or [result.status]
            raise refusal(f"a probe that did not complete: {reason[0]}", 'see docs/sandbox.md, "When it refuses"')
    return frozenset(layer for layer in ALL_LAYERS if lines.get(layer) == "broken")


_log = logging.getLogger(__name__)

_unconfined: WeakSet[Sandbox] = WeakSet()


def find_unconfined_sandbox() -> str | None:
    """Return the isolation of a sandbox in this process that does not isolate programs, or None."""
    if _unconfined:
        gc.collect()  # removes the sandboxes that nothing refers to any more
    return next((sandbox.isolation for sandbox in _unconfined), None)


def sandbox_level(declaration: object) -> str | None:
    """Return the isolation that a tool or an environment declares, such as ``bubblewrap: files network``."""
    if isinstance(declaration, Sandbox):
        return declaration.isolation
    return declaration if isinstance(declaration, str) else None


def validate_sandbox(declaration: object) -> str | None:
    """Return :func:`sandbox_level`. Raise InvalidInput if the declaration is neither a Sandbox, nor text, nor None."""
    level = sandbox_level(declaration)
    if declaration is not None and level is None:
        do = "give a Sandbox, or say in words where code runs: 'none: ..'"
        raise InvalidInput("sandbox", got=repr(declaration), do=do)
    return level


class Sandbox:
    """A sandbox for untrusted Python programs. An error of a program is not raised; it is part of the result.

    The first sandbox of level ``bubblewrap`` in a process verifies the isolation. Raise InvalidInput if the level is
    not available on this machine.

    Example:
        sandbox = Sandbox()
        result = await sandbox.run("print(int(input()) * 2)", stdin="21")
        result.ok, result.stdout.text            # (True, "42\\n")
        await sandbox.grade("def f(x): return x + 1", "assert f(1) == 2", calls=("f",))    # Verdict(True)
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._layers = verify_isolation(self.config)
        if self.config.level == "none":
            _log.warning("sandbox 'none': programs written by a model run with your rights, files and network")
            _unconfined.add(self)

    @property
    def isolation(self) -> str:
        """The isolation level and its layers as text, such as "bubblewrap: files limits network"."""
        return f"{self.config.level}: {' '.join(sorted(self._layers)) or 'nothing'}"

    async def run(self, source: str, *, stdin: str | bytes = b"", limits: Limits | None = None) -> ExecutionResult:
        """Run a whole program in a fresh process, and return the result."""
        data = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        async with slot():
            return await run_program(self._confine(limits), source, stdin=data)

    async def grade(
        self, candidate: str, tests: str, *, calls: Sequence[str], setup: str = "", limits: Limits | None = None
    ) -> Verdict:
        """Run ``setup`` and ``tests``, which call functions of ``candidate`` by the names in ``calls``.

        The candidate cannot see or change the tests, and cannot forge the verdict. The limits apply to each of the two
        processes.
        """
        async with slot():
            return await grade(self._confine(limits), candidate, tests, calls, setup)

    def interpreter(self, limits: Limits | None = None) -> Interpreter:
        """Return an interpreter that keeps its variables between calls. The caller has to close it."""
        return Interpreter(self._confine(limits))

    def _confine(self, limits: Limits | None) -> Confinement:
        return Confinement(self._layers, limits or self.config.limits, self.config.packages)
