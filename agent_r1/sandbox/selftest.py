"""Whether the sandbox holds on this machine, found out by attacking it. What is not seen to hold is not relied on."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.cgroup import clear_stale_cgroups
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.isolation import ALL_LAYERS, Confinement, IsolationLayer
from agent_r1.sandbox.process import start_process
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus
from agent_r1.sandbox.syscalls import pyseccomp

_log = logging.getLogger(__name__)

_ATTACKS = (Path(__file__).parent / "inside" / "attacks.py").read_text()
SMALL = Limits(seconds=10, memory=128 * 2**20, processes=8, disk=2**20, open_files=32)
"""The limits under which attacks are tried: bombs that go off stay small."""

_VARIABLE = "AGENT_R1_CANARY"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class World:
    """What there is to be had outside: see ``inside/attacks.py``."""

    token: str
    secret: str
    folder: str
    variable: str
    host: str
    port: int
    abstract: str
    victim: int
    memory: int = SMALL.memory
    processes: int = SMALL.processes
    disk: int = SMALL.disk
    open_files: int = SMALL.open_files


@dataclass(frozen=True, slots=True)
class Attempted:
    """How one attack went. ``told`` is what stopped it, "" where nothing did or nothing was said."""

    name: str
    hit: bool
    told: str


def layers_in_force(config: SandboxConfig) -> frozenset[IsolationLayer]:
    """The layers of a level, seen to hold.

    Raises:
        InvalidInput: something is missing, or an attack succeeded.
    """
    for folder in config.packages:
        if not folder.is_dir():
            raise InvalidInput("packages of the sandbox", got=f"{folder}, which is no folder", do="give folders")
    return frozenset() if config.level == "none" else _proved()


@lru_cache(maxsize=1)
def _proved() -> frozenset[IsolationLayer]:
    if sys.platform != "linux":
        raise refusal(f"{sys.platform}", "use Linux")
    if shutil.which("bwrap") is None:
        raise refusal("no program bwrap", "install bubblewrap (apt-get install bubblewrap)")
    if pyseccomp is None:
        raise refusal("no pyseccomp", "pip install 'agent-r1[sandbox]', and apt-get install libseccomp2")
    clear_stale_cgroups()
    layers = _in_a_loop_of_its_own(_with_cgroup())
    wrong = _in_a_loop_of_its_own(find_holes(layers))
    if wrong is not None:
        raise refusal(wrong, 'see docs/sandbox.md, "Where it refuses"')
    return layers


def refusal(got: str, do: str) -> InvalidInput:
    """The one line for whoever wanted to run programs that nobody trusts."""
    accept = "or accept the risk with --sandbox none (in Python: SandboxConfig(level='none'))"
    return InvalidInput("sandbox 'bubblewrap'", got=got, do=f"{do}, {accept}")


def _in_a_loop_of_its_own(work: Coroutine[None, None, _T]) -> _T:
    """Whoever makes a sandbox may or may not be inside an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def find_holes(layers: frozenset[IsolationLayer]) -> str | None:
    """What is wrong with these layers; None where everything that was tried was stopped."""
    with taskset() as outside:
        outcome, attempts = await assault(Confinement(layers, SMALL), outside)
    if outcome.status is ExecutionStatus.NOT_STARTED:
        return outcome.error
    hits = [attempt.name for attempt in attempts if attempt.hit]
    if hits:
        return f"one that does not hold here: {', '.join(hits)}"
    if not outcome.ok:
        last = outcome.error.strip().splitlines()[-1:]
        return f"attacks that did not come to their end: {outcome.status} {last}"
    hanging = await run(Confinement(layers, SMALL.model_copy(update={"seconds": 0.2})), "while True: pass")
    return None if hanging.status is ExecutionStatus.TIMED_OUT else f"a program that hangs and is not stopped: {hanging.status}"


async def assault(confinement: Confinement, outside: World, names: Sequence[str] = ()) -> tuple[ExecutionResult, tuple[Attempted, ...]]:
    """Try attacks in one process: those named, or all that can share one."""
    outcome = await run(confinement, f"{_ATTACKS}\nassault({asdict(outside)!r}, {list(names)!r})")
    lines = (line.split(" ", 2) for line in outcome.stdout.text.splitlines())
    return outcome, tuple(Attempted(name, result == "hit", told) for result, name, told in lines)


async def run(confinement: Confinement, source: str) -> ExecutionResult:
    """One program in a jail that may or may not hold: for the test itself, and for measuring what a layer stops."""
    process = await start_process(confinement)
    if isinstance(process, ExecutionResult):
        return process
    try:
        return await process.call("program", source)
    finally:
        await process.close()


async def _with_cgroup() -> frozenset[IsolationLayer]:
    """All layers, with the cgroup only where it is seen to stop processes that together hold too much."""
    with taskset() as outside:
        _, attempts = await assault(Confinement(ALL_LAYERS, SMALL), outside, ["memory_of_many"])
    return ALL_LAYERS - {IsolationLayer.CGROUP} if any(attempt.hit for attempt in attempts) else ALL_LAYERS


@contextmanager
def taskset() -> Iterator[World]:
    """A secret file, an environment variable, listening sockets and a victim process, for as long as it takes."""
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-r1-"))
        os.chmod(folder, 0o755)  # so that it is not a file's mode that stops anybody
        secret = Path(folder, "secret")
        secret.write_text(token)
        leaked = os.open(secret, os.O_RDONLY)
        stack.callback(os.close, leaked)
        os.set_inheritable(leaked, True)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (f"\0{token}", str(Path(folder, "line"))):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.bind(address)
            line.listen()
        os.environ[_VARIABLE] = token
        stack.callback(os.environ.pop, _VARIABLE)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]))
        stack.callback(victim.kill)
        port = listener.getsockname()[1]
        yield World(token, str(secret), folder, _VARIABLE, socket.gethostname(), port, token, victim.pid)
