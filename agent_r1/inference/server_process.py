"""A server in its own process group, which ends when the run ends, even if the run is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

GUARD = Path(__file__).with_name("server_guard.py")

LOOPBACK = "127.0.0.1"

STOP_SECONDS = 15.0
"""The time after SIGTERM until a server is killed, in seconds."""

KILL_SECONDS = 10.0
"""The time limit for the end of a server's processes after :meth:`ServerProcess.kill`, in seconds."""

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables that a server in another Python environment must not inherit."""


class Server(Protocol):
    """A server that a run started, on this machine or on another machine."""

    @property
    def log(self) -> Path:
        """The file with the server's output, on the machine of the server."""
        ...

    @property
    def is_running(self) -> bool: ...

    def kill(self) -> None:
        """Send SIGKILL to all processes of the server, without waiting for their end.

        Call :meth:`stop` afterwards: :meth:`stop` waits until the processes have ended.
        """
        ...

    def stop(self) -> None:
        """End the server and all its child processes. A second call does nothing."""
        ...

    def last_words(self) -> str:
        """Return the line of the server's output that best explains why the server ended."""
        ...


class ServerProcess:
    """A running server on this machine. Its output goes to the file ``log``.

    The server inherits the environment variables of the run, except the variables that ``FOREIGN`` lists. The
    variables in ``environment`` are added.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log: Path = log
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(GUARD), *command],
                env={**inherited, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The id of the server's process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        """End the server and all its child processes. A second call does nothing.

        All processes get SIGTERM, and after ``STOP_SECONDS`` SIGKILL.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait()

    def last_words(self) -> str:
        """Return the last line of the output that contains "Error", or else the last line.

        Lines with "resource_tracker" are skipped: they are warnings of Python's multiprocessing.
        """
        output = self.log.read_text("utf-8", "replace").splitlines()
        lines = [line.strip() for line in output if line.strip() and "resource_tracker" not in line]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing was printed"])[-1]


def free_port(host: str = LOOPBACK) -> int:
    """Return a free TCP port at the address ``host`` of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
