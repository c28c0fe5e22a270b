"""Fixtures for the tests of tools, environments, rewards and the sandbox."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from sandboxed import sandbox_or_skip

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session")
def task() -> Task:
    return Task("t/1", (Message.user("Who rules Alba?"),), {"answers": ("Bruno", "Bruno I")})


@pytest.fixture(scope="session")
def context() -> Callable[[int], RolloutContext]:
    return lambda sample_index=0: RolloutContext(AttemptId("run", "t/1", 0, sample_index), seed=sample_index)


@pytest.fixture(scope="session")
def make_action() -> Callable[..., Action]:
    return lambda text="", *calls: Action(Message.assistant(text, calls), text)


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    def build(*turns: tuple[Action, Sequence[ToolResult]], status: Status = Status.COMPLETED) -> Trajectory:
        made = tuple(
            Turn(index, index - 1 if index else None, (), (), (), (), "stop", action, results=tuple(results))
            for index, (action, results) in enumerate(turns)
        )
        return Trajectory(AttemptId("run", "t/1", 0, 0), "t/1", made, status)

    return build


@pytest.fixture(scope="session")
def call() -> Callable[..., ToolCall]:
    return lambda name, id="c0", /, **arguments: ToolCall(id, name, arguments, "")


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return sandbox_or_skip(Limits(seconds=5, memory=2**28, disk=2**20, output=1000))


@pytest.fixture(scope="session")
def has_ended() -> Callable[[int], bool]:
    def has_ended(pid: int) -> bool:
        for _ in range(100):
            try:
                state = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]
            except OSError:
                return True
            if state == "Z":
                return True
            time.sleep(0.05)
        return False

    return has_ended


@pytest.fixture(scope="session")
def serve_script() -> Iterator[Callable[[Path], tuple[str, int]]]:
    running: list[subprocess.Popen[bytes]] = []

    def serve_script(script: Path) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        running.append(process)
        for _ in range(2400):
            assert process.poll() is None, f"{script} ended"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return f"http://127.0.0.1:{port}", process.pid
            time.sleep(0.05)
        raise AssertionError(f"{script} does not listen")

    yield serve_script
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
