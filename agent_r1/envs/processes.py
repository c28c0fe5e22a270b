"""Worker processes for Python objects whose methods block: one object per process.

If an object hangs, crashes or changes global state, only its worker process is harmed. A worker process is not a
sandbox: it has all rights of the program. The package of an object is imported only once, in a server process
(:mod:`agent_r1.envs.fork_server`), which then forks the worker processes.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from agent_r1.core.errors import AgentR1Error
from agent_r1.envs.fork_server import LENGTH
from agent_r1.tools.execution import CallFailure, CallOutcome, CallTimeout, ReturnValue, run_with_timeout

START_SECONDS = 60.0
"""The time limit for importing a package and forking a process."""

MAX_ANSWER = 16 * 2**20
"""The maximum number of bytes of the result of a call. A process that sends more is killed."""


class WorkerProcess:
    """A worker process that holds one object and handles one call at a time (see :func:`start_process`)."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server, self._pid = server, pid
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def alive(self) -> bool:
        return self._streams is not None

    async def connect(self, connection: socket.socket) -> None:
        self._streams = await asyncio.open_connection(sock=connection)

    async def call(self, method: str, *arguments: Any, timeout: float) -> CallOutcome:
        """Call a method of the object in the worker process. Return the outcome: a value, a failure or a timeout."""
        return await self.request({"call": method, "arguments": arguments}, timeout)

    async def request(self, request: Mapping[str, Any], timeout: float) -> CallOutcome:
        if self._streams is None:
            return CallFailure("its process has ended")
        try:
            async with asyncio.timeout(timeout):
                return await _exchange(*self._streams, request)
        except TimeoutError:
            await self.kill()
            return CallTimeout(timeout)
        except (OSError, EOFError) as error:
            await self.kill()
            return CallFailure(f"its process ended ({type(error).__name__})")
        except asyncio.CancelledError:
            self._disconnect()  # otherwise a later call would receive the answer to this call
            raise

    async def kill(self) -> None:
        """Kill the process, if it still runs, and the processes that it started."""
        pid, self._pid = self._pid, 0
        self._disconnect()
        if pid:
            await run_with_timeout(partial(self._server.kill, pid), START_SECONDS)

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def start_process(package: str, name: str, keywords: Mapping[str, Any], timeout: float) -> WorkerProcess:
    """Start a worker process with an object of ``name`` (``module:class``), made with JSON ``keywords``.

    ``package`` is imported once, before processes are forked. Raise AgentR1Error if this fails.
    """
    outcome = await run_with_timeout(partial(_fork, package), START_SECONDS)
    if not isinstance(outcome, ReturnValue):
        raise AgentR1Error(f"no process with {package} could be started: {_describe(outcome)}")
    process, connection = cast("tuple[WorkerProcess, socket.socket]", outcome.value)
    try:
        await process.connect(connection)
        unwrap(await process.request({"make": name, "keywords": dict(keywords)}, timeout), f"starting {name}")
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    return process


def unwrap(outcome: CallOutcome, action: str) -> Any:
    """Return the value that a call returned. Raise AgentR1Error about ``action`` if the call failed or timed out."""
    if isinstance(outcome, ReturnValue):
        return outcome.value
    raise AgentR1Error(f"{action} failed: {_describe(outcome)}")


def _describe(outcome: CallFailure | CallTimeout) -> str:
    return outcome.reason if isinstance(outcome, CallFailure) else f"no answer within {outcome.seconds:g} seconds"


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Mapping[str, Any]
) -> ReturnValue | CallFailure:
    data = json.dumps(request).encode()
    writer.write(LENGTH.pack(len(data)) + data)
    await writer.drain()
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_ANSWER:
        raise EOFError("the answer is too long")
    answer = json.loads(await reader.readexactly(length))
    return CallFailure(answer["raised"]) if "raised" in answer else ReturnValue(answer["value"])


class _ForkServer:
    """A running server process. Its methods block, and any thread can call them."""

    def __init__(self, package: str) -> None:
        self._lock = threading.Lock()
        self._control, child_end = socket.socketpair()
        command = [sys.executable, "-m", "agent_r1.envs.fork_server", str(child_end.fileno()), package]
        # With a fixed hash seed, the order of a set is the same in every run.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command,
            pass_fds=[child_end.fileno()],
            env=environment,
            start_new_session=True,  # so that an interrupt at the terminal only reaches this process
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        child_end.close()

    def fork(self) -> tuple[WorkerProcess, socket.socket]:
        our_end, child_end = socket.socketpair()
        with child_end:
            reply = self._request({"fork": True}, child_end)
        if "failed" in reply:
            our_end.close()
            raise RuntimeError(reply["failed"])
        return WorkerProcess(self, reply["pid"]), our_end

    def kill(self, pid: int) -> None:
        with suppress(OSError, EOFError):  # if the server has ended, its worker processes have ended too
            self._request({"kill": pid})

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _request(self, request: Mapping[str, Any], *attached: socket.socket) -> dict[str, Any]:
        with self._lock:
            descriptors = [connection.fileno() for connection in attached]
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            header = self._control.recv(LENGTH.size, socket.MSG_WAITALL)
            if len(header) < LENGTH.size:
                raise EOFError("the fork server ended")
            (length,) = LENGTH.unpack(header)
            return json.loads(self._control.recv(length, socket.MSG_WAITALL))


_servers: dict[str, _ForkServer] = {}
_servers_lock = threading.Lock()


def _fork(package: str) -> tuple[WorkerProcess, socket.socket]:
    with _servers_lock:
        server = _servers.get(package)
        if server is None or not server.alive:
            server = _servers[package] = _ForkServer(package)
    return server.fork()


@dataclass(slots=True)
class _LoopState:
    idle: list[WorkerProcess] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(os.cpu_count() or 1))


class ProcessPool:
    """Worker processes, each with an object. After a failed call, a later one starts a new process."""

    def __init__(self, package: str, name: str, seconds: float) -> None:
        self._package, self._name, self._seconds = package, name, seconds
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    async def call(self, method: str, *arguments: Any) -> CallOutcome:
        """Call a method of the object of a free process. Waiting for it does not count towards the time limit."""
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
