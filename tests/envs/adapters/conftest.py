"""What the tests of adapters share: played episodes, processes that are gone, servers on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env, RolloutContext, Transition
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def play() -> Callable[..., object]:
    """Play an episode: the first observation, and the transition of each action. It is closed whatever happens."""

    async def play(env: Env, task: Task, *actions: str, seed: int = 0) -> tuple[str, list[Transition]]:
        episode = await env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), seed))
        try:
            said = [Action(Message.assistant(text), text) for text in actions]
            return episode.start[-1].text, [await episode.step(action) for action in said]
        finally:
            await episode.close()

    return play


@pytest.fixture(scope="session")
def gone() -> Callable[[int], bool]:
    """Whether a process ends within a few seconds."""

    def gone(pid: int) -> bool:
        for _ in range(100):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                return True
            if state == "Z":
                return True
            time.sleep(0.05)
        return False

    return gone


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[str], tuple[str, int]]]:
    """Start a server script of this folder on a free port of loopback: its URL and its process."""
    running: list[subprocess.Popen[bytes]] = []

    def serve(script: str) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), str(port)], stderr=subprocess.DEVNULL, start_new_session=True
        )
        running.append(process)
        for _ in range(600):
            assert process.poll() is None, f"{script} ended"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return f"http://127.0.0.1:{port}", process.pid
            time.sleep(0.05)
        raise AssertionError(f"{script} does not listen")

    yield serve
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
