"""Environment workers in a thread and in a child process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from agent_r1.core.environment import Env
from agent_r1.core.task import Task
from agent_r1.workers.protocol import WorkerDescription
from agent_r1.workers.server import EnvironmentWorker

DESCRIPTION = WorkerDescription(version="1", taskset="t", fingerprints={"tasks": "a", "tools": "b"})


@contextmanager
def serving(
    envs: Mapping[str, Env],
    description: WorkerDescription = DESCRIPTION,
    tasks: Mapping[str, Sequence[Task]] = MappingProxyType({}),
    **options: Any,
) -> Iterator[EnvironmentWorker]:
    """Serve environments in a thread with an event loop of its own."""
    worker = EnvironmentWorker(envs, lambda split: tasks.get(split, ()), description, **options)
    started = threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        worker.start()
        started.set()
        await stop.wait()
        await worker.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield worker
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def forked(run: Callable[[int], object]) -> Iterator[tuple[int, int]]:
    """Run ``run(pipe)`` in a child process. Yield its process id and the end of the pipe to read from."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            run(write)
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield child, read
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
