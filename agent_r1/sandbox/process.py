"""One process in the sandbox: start it, send programs, read the output with limited memory, kill it."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from agent_r1.sandbox.isolation import Confinement, IsolationLayer, filter_program

ROOT = Path("/sys/fs/cgroup")

_NAME = re.compile(r"agent-r1-(\d+)-\d+")
_REMOVE_TRIES, _REMOVE_SECONDS = 500, 0.002
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """The names of the files that control a cgroup of version 1 or 2."""

    limits: tuple[str, ...]  # the files for the memory limit, in the order of writing; the first must exist
    events: str  # counts the processes killed because of the memory limit


V1 = CgroupVersion(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control")
V2 = CgroupVersion(("memory.max",), "memory.events")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup (control group): a group of processes whose total memory the kernel limits."""

    path: Path
    version: CgroupVersion

    @property
    def procs(self) -> Path:
        """The file to which a process writes its id to join the cgroup."""
        return self.path / "cgroup.procs"

    def ran_out_of_memory(self) -> bool:
        try:
            found = re.search(r"^oom_kill (\d+)", (self.path / self.version.events).read_text("utf-8"), re.MULTILINE)
        except OSError:
            return False
        return found is not None and int(found.group(1)) > 0

    def discard(self) -> None:
        """Remove the cgroup if no process has joined it."""
        with suppress(OSError):
            self.path.rmdir()

    async def remove(self) -> None:
        """Remove the cgroup when its processes have ended. After a second, leave it to :func:`clear_stale_cgroups`."""
        for _ in range(_REMOVE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(_REMOVE_SECONDS)
            else:
                return


def make_cgroup(memory: int) -> Cgroup | None:
    """Return a new cgroup with a memory limit in bytes, or None if this machine does not permit cgroups."""
    for parent, version in _parents():
        path = parent / f"agent-r1-{os.getpid()}-{next(_serial)}"
        with suppress(OSError):
            path.mkdir()
            if _set_limit(path, version, memory):
                return Cgroup(path, version)
            path.rmdir()
    return None


def clear_stale_cgroups() -> None:
    """Remove the empty cgroups that earlier processes made and left behind."""
    for parent, _ in _parents():
        for path in parent.glob("agent-r1-*"):
            match = _NAME.fullmatch(path.name)
            if match and not Path("/proc", match.group(1)).exists():
                with suppress(OSError):
                    path.rmdir()


def _parents() -> Iterator[tuple[Path, CgroupVersion]]:
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield ROOT / path.lstrip("/"), V2
        elif controllers == "memory":
            yield ROOT / "memory" / path.lstrip("/"), V1


def _set_limit(path: Path, version: CgroupVersion, memory: int) -> bool:
    # Some kernels create only some of the files.
    names = [name for name in version.limits if (path / name).exists()]
    for name in names:
        (path / name).write_text(str(memory), "utf-8")
    return version.limits[0] in names


class ExecutionStatus(StrEnum):
    """How the execution of code in a sandbox ended. Only NOT_STARTED is a failure of the sandbox itself."""

    OK = "ok"
    RAISED = "raised"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    FLOODED = "flooded"
    DIED = "died"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one call on one stream (stdout or stderr)."""

    data: bytes = b""  # the output up to the limit
    dropped: int = 0  # the number of bytes after the limit

    @property
    def text(self) -> str:
        """The kept output as UTF-8. Invalid bytes become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one execution of code in a sandbox.

    An untrusted program can forge its status and output. To test a function, use :meth:`Sandbox.grade`.
    """

    status: ExecutionStatus
    stdout: Output = Output()
    stderr: Output = Output()
    error: str = ""  # a traceback if the program raised an exception, otherwise the reason in one line
    seconds: float = 0.0  # the wall-clock time, without the start of the process
    restarted: bool = False  # whether the interpreter was restarted before the call, and lost its variables

    @property
    def ok(self) -> bool:
        return self.status is ExecutionStatus.OK

    @property
    def alive(self) -> bool:
        """Whether the process still runs and accepts another call."""
        return self.status in (ExecutionStatus.OK, ExecutionStatus.RAISED, ExecutionStatus.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of grading a candidate: untrusted code whose functions are called by tests."""

    passed: bool | None  # None if the sandbox or the tests failed
    reason: str = ""  # why the candidate did not pass or could not be graded


START_SECONDS = 30.0

MAX_STREAM = 64 * 2**20
"""The largest number of bytes that a call may print to stdout, or to stderr. A process that prints more is killed."""

_END_SECONDS = 1.0
_CHUNK = 2**16
_MAX_REPORT = 2**16
_JOIN_CGROUP = 'echo $$ > "$0" && exec "$@"'

_STATUSES = {b"o": ExecutionStatus.OK, b"e": ExecutionStatus.RAISED, b"m": ExecutionStatus.OUT_OF_MEMORY}
"""The status for each letter in a worker's report."""


class _WorkerGone(Exception):
    """The worker has ended, or has sent bytes that are not a valid report."""


class _Stream:
    def __init__(self, source: int, limit: int) -> None:
        self.source, self._limit = source, limit
        self._head, self.total = bytearray(), 0
        os.set_blocking(source, False)

    def read(self) -> bool:
        try:
            data = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return False
        self.total += len(data)
        self._head += data[: max(self._limit - len(self._head), 0)]
        return bool(data)

    def take(self) -> Output:
        for _ in range(fcntl.fcntl(self.source, fcntl.F_GETPIPE_SZ) // _CHUNK + 1):
            if not self.read():
                break
        output = Output(bytes(self._head), self.total - len(self._head))
        self._head, self.total = bytearray(), 0
        return output


class SandboxProcess:
    """A worker process in the sandbox, made by :func:`start_process`. The caller has to close it."""

    def __init__(
        self,
        confinement: Confinement,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        streams: tuple[_Stream, _Stream],
        cgroup: Cgroup | None,
    ) -> None:
        self._confinement, self._process, self._control, self._cgroup = confinement, process, control, cgroup
        self._streams, self._ready = streams, False
        self._loop = asyncio.get_running_loop()
        for stream in streams:
            self._loop.add_reader(stream.source, self._on_output, stream)

    async def call(self, kind: Literal["cell", "program"], source: str) -> ExecutionResult:
        """Run source code and return the result. If ``result.alive`` is False, the process accepts no further call.

        A "cell" runs as in a notebook: the value of the last expression is printed, and later cells can use the
        variables. A "program" runs as a script.
        """
        text = source.encode("utf-8", "replace")
        try:
            error = await self._send(kind[:1].encode() + len(text).to_bytes(8, "little") + text)
            if error is not None:
                return ExecutionResult(ExecutionStatus.NOT_STARTED, error=f"the sandbox did not start: {error}")
            start = time.monotonic()
            status, error = await self._wait_for_end()
        except asyncio.CancelledError:
            self.kill()
            raise
        stdout, stderr = (stream.take() for stream in self._streams)
        return ExecutionResult(status, stdout, stderr, error, time.monotonic() - start)

    def kill(self) -> None:
        # The process is the first one of a PID namespace, so the kernel ends all others too.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process and release its resources, even if the caller is cancelled."""
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
        if self._cgroup is not None:
            await self._cgroup.remove()

    async def _send(self, request: bytes) -> str | None:
        # The worker reads the request only after it has dropped its privileges.
        try:
            async with asyncio.timeout(START_SECONDS):
                with suppress(OSError):  # if the worker has ended, the next lines detect its end
                    await self._loop.sock_sendall(self._control, request)
                if not self._ready:
                    await self._receive_report()
                    self._ready = True
        except TimeoutError:
            self.kill()
            return f"it was not ready within {START_SECONDS:g} seconds"
        except (_WorkerGone, OSError):
            lines = self._streams[1].take().text.strip().splitlines()
            return f"{lines[-1] if lines else 'it ended at once'} ({await self._exit_status()})"
        return None

    async def _wait_for_end(self) -> tuple[ExecutionStatus, str]:
        seconds = self._confinement.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                letter, text = await self._receive_report()
        except TimeoutError:
            self.kill()
            return ExecutionStatus.TIMED_OUT, f"stopped after {seconds:g} seconds"
        except (_WorkerGone, OSError):
            return await self._find_cause()
        return _STATUSES[letter], text

    async def _receive_report(self) -> tuple[bytes, str]:
        header = await self._read_exactly(5)
        letter, size = header[:1], int.from_bytes(header[1:], "little")
        if letter not in (_STATUSES if self._ready else (b"r",)) or size > _MAX_REPORT:
            raise _WorkerGone
        return letter, (await self._read_exactly(size)).decode("utf-8", "replace")

    async def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self._loop.sock_recv(self._control, size - len(data))
            if not more:
                raise _WorkerGone
            data += more
        return data

    async def _find_cause(self) -> tuple[ExecutionStatus, str]:
        exit_status, limits = await self._exit_status(), self._confinement.limits
        if any(stream.total > MAX_STREAM for stream in self._streams):
            return ExecutionStatus.FLOODED, f"stopped after it had printed more than {MAX_STREAM} bytes"
        if self._cgroup is not None and self._cgroup.ran_out_of_memory():
            return ExecutionStatus.OUT_OF_MEMORY, f"killed: more than {limits.memory} bytes of memory in all"
        if exit_status == signal.SIGXCPU.name:
            return ExecutionStatus.TIMED_OUT, f"stopped after {limits.cpu_seconds} CPU seconds"
        return ExecutionStatus.DIED, f"the process ended ({exit_status})"

    async def _exit_status(self) -> str:
        # Bubblewrap reports signal N as the exit status 128 + N.
        try:
            async with asyncio.timeout(_END_SECONDS):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()  # the process closed its connection, but still runs
            return "it closed its line"
        number = -status if status < 0 else status - 128
        return signal.Signals(number).name if number in signal.valid_signals() else f"exit status {status}"

    def _on_output(self, stream: _Stream) -> None:
        more = stream.read()
        if stream.total > MAX_STREAM:
            self.kill()
        if not more or stream.total > MAX_STREAM:
            self._loop.remove_reader(stream.source)


async def run_program(
    confinement: Confinement, source: str, *, stdin: bytes = b"", connection: socket.socket | None = None
) -> ExecutionResult:
    """Run a whole program in a process of its own, and return the result.

    The new process inherits the socket ``connection`` under the same file descriptor. It is closed in this process.
    """
    process = await start_process(confinement, stdin, () if connection is None else (connection.fileno(),))
    if connection is not None:
        connection.close()
    if isinstance(process, ExecutionResult):
        return process
    try:
        return await process.call("program", source)
    finally:
        await process.close()


async def start_process(
    confinement: Confinement, stdin: bytes = b"", descriptors: Sequence[int] = ()
) -> SandboxProcess | ExecutionResult:
    """Start a process in the sandbox. If it cannot be created, return a result with the reason."""
    try:
        return await _spawn(confinement, stdin, descriptors)
    except OSError as error:
        return ExecutionResult(ExecutionStatus.NOT_STARTED, error=f"the sandbox did not start: {error}")


async def _spawn(confinement: Confinement, stdin: bytes, descriptors: Sequence[int]) -> SandboxProcess:
    layers, limits = confinement.layers, confinement.limits
    cgroup = make_cgroup(limits.memory) if IsolationLayer.CGROUP in layers else None
    # ``child`` always closes the child's ends. ``parent`` closes the ends of this process only if the start fails.
    with ExitStack() as child, ExitStack() as parent:
        if cgroup is not None:
            parent.callback(cgroup.discard)
        parent_control, child_control = socket.socketpair()
        parent.callback(parent_control.close)
        child.callback(child_control.close)
        parent_control.setblocking(False)
        reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        for stack, ends in ((parent, reads), (child, writes)):
            for end in ends:
                stack.callback(os.close, end)
        stdin_file = child.enter_context(_memory_file(stdin))
        rules = child.enter_context(_memory_file(filter_program())) if IsolationLayer.SYSCALLS in layers else None
        process = await asyncio.create_subprocess_exec(
            *([] if cgroup is None else ["/bin/sh", "-c", _JOIN_CGROUP, str(cgroup.procs)]),
            *confinement.command(child_control.fileno(), rules),
            stdin=stdin_file,
            stdout=writes[0],
            stderr=writes[1],
            pass_fds=[child_control.fileno(), *descriptors, *([] if rules is None else [rules])],
            env=confinement.environment(),
            cwd="/tmp",
            start_new_session=True,
        )
        parent.pop_all()
        streams = (_Stream(reads[0], limits.output), _Stream(reads[1], limits.output))
        return SandboxProcess(confinement, process, parent_control, streams, cgroup)


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    file = os.memfd_create("agent-r1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(file, content)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


MAX_CONCURRENT = 2 * (os.cpu_count() or 1)

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def slot() -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits while ``MAX_CONCURRENT`` programs run in the event loop."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))
