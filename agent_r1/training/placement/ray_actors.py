"""Ray actors that each own one process of a run: a rank of the trainer, or a vLLM server.

The workers of Ray import this module, so it imports neither torch nor Ray. An actor ends with the process of the run
that made it.
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
    """An actor that owns the process of a rank.

    The process of the rank ends with the actor, or when its connection to the process of the run is closed.

    Args:
        arguments: the arguments of Python that start the rank.
        environment: further environment variables of the rank.
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
        """Return the exit code of the rank when it has ended; -N if signal N ended it."""
        return self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ServerActor:
    """Owns a vLLM server, which a guard process kills if the actor ends."""

    def free_port(self, host: str) -> int:
        """Return a port that no server uses now, on the machine of the actor with the address ``host``."""
        return free_port(host)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the server, whose output goes to the file ``log``."""
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
