"""Ray actors, each of which owns one process of a run: a rank of the trainer, or a vLLM server.

The workers of Ray import this module. The module does not import torch, so that the workers start fast. The module does
not import Ray either, because Ray is an optional package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agent_r1.inference.server_process import ServerProcess, free_port


class RankActor:
    """An actor that owns the process of a rank. The process is Python with the command-line arguments ``arguments``.

    The rank ends when the actor ends, or when the connection between rank and run is closed.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,  # the rank ends when this actor ends, however it ends
            process_group=0,
        )

    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Wait until the rank ends, and return its exit code; -N if signal N ended the rank."""
        return self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ServerActor:
    """An actor that owns a vLLM server. A guard process kills the server if the actor ends."""

    def free_port(self, host: str) -> int:
        """Return a free port at ``host``, the address of the actor's machine."""
        return free_port(host)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = ServerProcess(command, environment, log)

    def is_running(self) -> bool:
        return self._process.is_running

    def last_words(self) -> str:
        return self._process.last_words()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()
