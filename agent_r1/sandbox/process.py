"""One process in the sandbox: started, sent programs, read with bounded memory, and killed with all its children."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from agent_r1.sandbox.cgroup import Cgroup, make_cgroup
from agent_r1.sandbox.isolation import Confinement, IsolationLayer
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus, Output
from agent_r1.sandbox.syscalls import filter_program

START_SECONDS = 30.0
"""How long a process may take until it is ready; on a busy machine many start at the same time."""

FLOOD = 64 * 2**20
"""Bytes on one stream in one call after which the process is killed: reading them costs the trainer its time."""

_END_SECONDS = 1.0
_CHUNK = 2**16
_LONGEST_REPORT = 2**16
_JOIN = 'echo $$ > "$0" && exec "$@"'

Kind = Literal["cell", "program"]
_ENDINGS = {b"o": ExecutionStatus.OK, b"e": ExecutionStatus.RAISED, b"m": ExecutionStatus.OUT_OF_MEMORY}


@dataclass(frozen=True, slots=True)
class _Report:
    """What the worker said: a letter, and what there is to say of it."""

    letter: bytes
    text: str


class _Broken(Exception):
    """The worker is gone, or says what no worker says."""


class _Stream:
    """Keeps the head of what a program writes, drops the rest, and never blocks."""

    def __init__(self, source: int, keep: int) -> None:
        self.source, self._keep = source, keep
        self._kept, self.total = bytearray(), 0
        os.set_blocking(source, False)

    def read(self) -> bool:
        """Read what is there, a chunk at most. Whether there may be more."""
        try:
            data = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return False
        self.total += len(data)
        self._kept += data[: max(self._keep - len(self._kept), 0)]
        return bool(data)

    def take(self) -> Output:
        """What came since the last time: all that was written before the worker's report is in the pipe by now."""
        for _ in range(fcntl.fcntl(self.source, fcntl.F_GETPIPE_SZ) // _CHUNK + 1):
            if not self.read():
                break
        output = Output(bytes(self._kept), self.total - len(self._kept))
        self._kept, self.total = bytearray(), 0
        return output


class SandboxProcess:
    """A worker in a jail. Make one with :func:`start_process`; close it, whatever happens."""

    def __init__(
        self,
        confinement: Confinement,
        process: asyncio.subprocess.SandboxProcess,
        control: socket.socket,
        streams: tuple[_Stream, _Stream],
        group: Cgroup | None,
    ) -> None:
        self._confinement, self._process, self._control, self._group = confinement, process, control, group
        self._streams, self._ready = streams, False
        self._loop = asyncio.get_running_loop()
        for stream in streams:
            self._loop.add_reader(stream.source, self._on_output, stream)

    async def call(self, kind: Kind, source: str) -> ExecutionResult:
        """Run a source text. Whatever happens is an outcome; where ``alive`` is False the process is gone."""
        text = source.encode("utf-8", "replace")
        try:
            wrong = await self._begin(kind[:1].encode() + len(text).to_bytes(8, "little") + text)
            if wrong is not None:
                return ExecutionResult(ExecutionStatus.NOT_STARTED, error=f"the sandbox did not start: {wrong}")
            began = time.monotonic()
            ended, error = await self._end()
        except asyncio.CancelledError:
            self.kill()
            raise
        stdout, stderr = (stream.take() for stream in self._streams)
        return ExecutionResult(ended, stdout, stderr, error, time.monotonic() - began)

    def kill(self) -> None:
        """Kill it and all it started. Its PID namespace dies with its first process, also what left the group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it and give everything back; whoever is cancelled meanwhile still waits for that."""
        self.kill()
        for stream in self._streams:
            self._loop.remove_reader(stream.source)
            os.close(stream.source)
        self._control.close()
        reaping = asyncio.ensure_future(self._reap())
        try:
            await asyncio.shield(reaping)
        except asyncio.CancelledError:
            await reaping
            raise

    async def _reap(self) -> None:
        await self._process.wait()
        if self._group is not None:
            await self._group.remove()

    async def _begin(self, request: bytes) -> str | None:
        """Send a request, and wait until the worker has given up its rights. What is wrong, or None.

        The request may be under way before: the worker reads nothing until it has given them up.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                with suppress(OSError):  # whoever is gone is noticed below
                    await self._loop.sock_sendall(self._control, request)
                if not self._ready:
                    await self._report()
                    self._ready = True
        except TimeoutError:
            self.kill()
            return f"it was not ready within {START_SECONDS:g} seconds"
        except (_Broken, OSError):
            lines = self._streams[1].take().text.strip().splitlines()
            return f"{lines[-1] if lines else 'it ended at once'} ({await self._told_end()})"
        return None

    async def _end(self) -> tuple[ExecutionStatus, str]:
        seconds = self._confinement.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                report = await self._report()
        except TimeoutError:
            self.kill()
            return ExecutionStatus.TIMED_OUT, f"stopped after {seconds:g} seconds"
        except (_Broken, OSError):
            return await self._ending()
        return _ENDINGS[report.letter], report.text

    async def _report(self) -> _Report:
        head = await self._exactly(5)
        letter, size = head[:1], int.from_bytes(head[1:], "little")
        if letter not in (_ENDINGS if self._ready else (b"r",)) or size > _LONGEST_REPORT:
            raise _Broken
        return _Report(letter, (await self._exactly(size)).decode("utf-8", "replace"))

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self._loop.sock_recv(self._control, size - len(data))
            if not more:
                raise _Broken
            data += more
        return data

    async def _ending(self) -> tuple[ExecutionStatus, str]:
        """Why the process is gone."""
        told = await self._told_end()
        if any(stream.total > FLOOD for stream in self._streams):
            return ExecutionStatus.FLOODED, f"stopped after it had printed more than {FLOOD} bytes"
        if self._group is not None and self._group.killed():
            return ExecutionStatus.OUT_OF_MEMORY, f"killed: more than {self._confinement.limits.memory} bytes of memory in all"
        if told == signal.SIGXCPU.name:
            return ExecutionStatus.TIMED_OUT, f"stopped after {self._confinement.limits.cpu_seconds} CPU seconds"
        return ExecutionStatus.DIED, f"the process ended ({told})"

    async def _told_end(self) -> str:
        """The exit status in words; bubblewrap says 128 + N for signal N."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()  # it closed its end, but lives on
            return "it closed its line"
        number = -status if status < 0 else status - 128
        return signal.Signals(number).name if number in signal.valid_signals() else f"exit status {status}"

    def _on_output(self, stream: _Stream) -> None:
        more = stream.read()
        if stream.total > FLOOD:
            self.kill()
        if not more or stream.total > FLOOD:
            self._loop.remove_reader(stream.source)


async def start_process(confinement: Confinement, stdin: bytes = b"", extra: Sequence[int] = ()) -> SandboxProcess | ExecutionResult:
    """A worker that is on its way, or why there is none; whether it arrives its first call tells.

    Args:
        stdin: what programs can read; then end of file.
        extra: descriptors to hand over, under their own numbers.
    """
    try:
        return await _spawn(confinement, stdin, extra)
    except OSError as error:
        return ExecutionResult(ExecutionStatus.NOT_STARTED, error=f"the sandbox did not start: {error}")


async def _spawn(confinement: Confinement, stdin: bytes, extra: Sequence[int]) -> SandboxProcess:
    group = make_cgroup(confinement.limits.memory) if IsolationLayer.CGROUP in confinement.layers else None
    with ExitStack() as theirs, ExitStack() as ours:
        if group is not None:
            ours.callback(group.discard)
        ours_control, their_control = socket.socketpair()
        ours.callback(ours_control.close)
        theirs.callback(their_control.close)
        ours_control.setblocking(False)
        reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        for stack, ends in ((ours, reads), (theirs, writes)):
            for end in ends:
                stack.callback(os.close, end)
        given = theirs.enter_context(_file(stdin))
        rules = theirs.enter_context(_file(filter_program())) if IsolationLayer.SYSCALLS in confinement.layers else None
        command = confinement.command(their_control.fileno(), rules)
        join = [] if group is None else ["/bin/sh", "-c", _JOIN, str(group.procs)]
        process = await asyncio.create_subprocess_exec(
            *join,
            *command,
            stdin=given,
            stdout=writes[0],
            stderr=writes[1],
            pass_fds=[their_control.fileno(), *extra, *([] if rules is None else [rules])],
            env=confinement.environment(),
            cwd="/tmp",
            start_new_session=True,
        )
        ours.pop_all()
        streams = (_Stream(reads[0], confinement.limits.output), _Stream(reads[1], confinement.limits.output))
        return SandboxProcess(confinement, process, ours_control, streams, group)


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A file in memory with this content, read from its start, that nobody can change."""
    made = os.memfd_create("agent-r1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(made, content)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(made, 0, os.SEEK_SET)
        yield made
    finally:
        os.close(made)
