"""Plain blocking Python in a process of its own: it may hang, crash or share global state, and nobody else notices.

Many packages draw from the global ``random``, are not thread safe, or hang in C code; a thread protects from none of
that. One process per package has imported it (:mod:`agent_r1.envs.adapters.fork_server`) and forks a process per
episode in a few milliseconds. This is isolation from accidents and not a sandbox: such a process may do all that
this one may.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from agent_r1.core.errors import AgentR1Error
from agent_r1.envs.adapters.fork_server import LENGTH
from agent_r1.tools.execution import CallFailure, CallOutcome, CallTimeout, ReturnValue, run_with_timeout

START_SECONDS = 60.0
"""What importing a package and forking may take."""

LONGEST = 16 * 2**20
"""Bytes of an answer; a process that sends more is given up."""


class WorkerProcess:
    """An object that lives in a process of its own, one call at a time. Make it with :func:`start`."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server, self._pid = server, pid
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._streams is not None

    async def connect(self, connection: socket.socket) -> None:
        self._streams = await asyncio.open_connection(sock=connection)

    async def call(self, method: str, *arguments: Any, timeout: float) -> CallOutcome:
        """Call a method with arguments that JSON can hold. Where that takes longer than ``timeout`` the process is
        killed."""
        return await self._ask({"call": method, "arguments": arguments}, timeout)

    async def make(self, name: str, keywords: Mapping[str, Any], timeout: float) -> CallOutcome:
        """Make the object: ``name`` is ``module:class``, to be imported over there."""
        return await self._ask({"make": name, "keywords": dict(keywords)}, timeout)

    async def _ask(self, request: Mapping[str, Any], timeout: float) -> CallOutcome:
        if self._streams is None:
            return CallFailure("its process has ended")
        try:
            async with asyncio.timeout(timeout):
                return await _exchange(*self._streams, request)
        except TimeoutError:
            await self.end()
            return CallTimeout(timeout)
        except (OSError, EOFError) as error:
            await self.end()
            return CallFailure(f"its process ended ({type(error).__name__})")
        except asyncio.CancelledError:
            self._disconnect()  # the answer that is still to come belongs to no later call
            raise

    async def end(self) -> None:
        """Kill the process and what it started. Nothing happens where it has ended."""
        pid, self._pid = self._pid, 0
        self._disconnect()
        if pid:
            await run_with_timeout(partial(self._server.kill, pid), START_SECONDS)

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def start_process(package: str, name: str, keywords: Mapping[str, Any], timeout: float) -> WorkerProcess:
    """A process, forked from one that has imported ``package``, with the object that ``name`` makes.

    Raises AgentR1Error where the package cannot be imported or the object cannot be made.
    """
    outcome = await run_with_timeout(partial(_fork, package), START_SECONDS)
    if not isinstance(outcome, ReturnValue):
        raise AgentR1Error(f"no process with {package} could be started: {_reason(outcome)}")
    process, connection = cast("tuple[WorkerProcess, socket.socket]", outcome.value)
    try:
        await process.connect(connection)
        unwrap(await process.make(name, keywords, timeout), f"starting {name}")
    except BaseException:
        await asyncio.shield(process.end())
        raise
    return process


def unwrap(outcome: CallOutcome, what: str) -> Any:
    """The value returned. Raises AgentR1Error where there is none."""
    if isinstance(outcome, ReturnValue):
        return outcome.value
    raise AgentR1Error(f"{what} failed: {_reason(outcome)}")


def _reason(outcome: CallFailure | CallTimeout) -> str:
    return outcome.reason if isinstance(outcome, CallFailure) else f"no answer within {outcome.seconds:g} seconds"


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Mapping[str, Any]
) -> ReturnValue | CallFailure:
    data = json.dumps(request).encode()
    writer.write(LENGTH.pack(len(data)) + data)
    await writer.drain()
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > LONGEST:
        raise EOFError("the answer is too long")
    answer = json.loads(await reader.readexactly(length))
    return CallFailure(answer["raised"]) if "raised" in answer else ReturnValue(answer["value"])


class _ForkServer:
    """A running fork server. Its methods block, and may be called from any thread."""

    def __init__(self, package: str) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "agent_r1.envs.adapters.fork_server", str(theirs.fileno()), package]
        # A fixed hash seed: the order of sets over there is the same in every run.
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=surroundings,
            start_new_session=True,  # an interrupt at the terminal is ours to handle
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()

    def fork(self) -> tuple[WorkerProcess, socket.socket]:
        """A process that waits to be told what to make, and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._order({"fork": True}, theirs)
        if "failed" in answer:
            ours.close()
            raise RuntimeError(answer["failed"])
        return WorkerProcess(self, answer["pid"]), ours

    def kill(self, pid: int) -> None:
        with suppress(OSError, EOFError):  # the server is gone, and what it forked with it
            self._order({"kill": pid})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _order(self, request: Mapping[str, Any], *given: socket.socket) -> dict[str, Any]:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [one.fileno() for one in given])
            head = self._control.recv(LENGTH.size, socket.MSG_WAITALL)
            if len(head) < LENGTH.size:
                raise EOFError("the fork server ended")
            (length,) = LENGTH.unpack(head)
            return json.loads(self._control.recv(length, socket.MSG_WAITALL))


_servers: dict[str, _ForkServer] = {}
_servers_lock = threading.Lock()


def _fork(package: str) -> tuple[WorkerProcess, socket.socket]:
    with _servers_lock:
        server = _servers.get(package)
        if server is None or not server.alive:
            server = _servers[package] = _ForkServer(package)
    return server.fork()
