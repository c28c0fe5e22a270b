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

import httpx

from agent_r1.core.errors import EngineError
from agent_r1.core.redaction import redact_url

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
        """Send SIGKILL to all processes of the server, without waiting for their end."""
        ...

    def stop(self) -> None:
        """End the server and all its child processes. A second call does nothing."""
        ...

    def last_words(self) -> str:
        """Return the line of the server's output that best explains why the server ended."""
        ...

    def deliver(self, folder: Path) -> None:
        """Copy a folder of weights to the same path on the server's machine, if that machine does not see it."""
        ...


class ServerProcess:
    """A running server, with the variables of the run except ``FOREIGN``. Its output goes to ``log``."""

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

    def deliver(self, folder: Path) -> None:
        """Do nothing: the server is on this machine."""

    def kill(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        """End all processes of the server: SIGTERM, and after ``STOP_SECONDS`` SIGKILL. A second call does nothing."""
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
        """Return the last line of the output with "Error", or else the last line, without multiprocessing's."""
        output = self.log.read_text("utf-8", "replace").splitlines()
        lines = [line.strip() for line in output if line.strip() and "resource_tracker" not in line]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing was printed"])[-1]


def free_port(host: str = LOOPBACK) -> int:
    """Return a free TCP port at the address ``host`` of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


CONNECT_SECONDS = 10.0
"""The time limit for opening a connection and for a health check, in seconds."""


class ReplicaError(EngineError):
    """Raised if a server fails."""


class ServerClient:
    """A client of an inference server, without a limit on connections and without proxies.

    Raise ReplicaError if the server failed, so that another one can take the request, and EngineError if it refuses a
    request to ``sample_path`` with status 400.
    """

    def __init__(self, url: str, sample_path: str) -> None:
        self.name = redact_url(url)
        self._sample_path = sample_path
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(base_url=url, limits=limits, trust_env=False)

    async def get(self, path: str, *, seconds: float) -> httpx.Response:
        return await self._send("GET", path, None, None, seconds)

    async def post(
        self, path: str, body: object = None, *, params: Mapping[str, str] | None = None, seconds: float | None = 60.0
    ) -> httpx.Response:
        return await self._send("POST", path, body, params, seconds)

    async def _send(
        self, method: str, path: str, body: object, params: Mapping[str, str] | None, seconds: float | None
    ) -> httpx.Response:
        if self._client.is_closed:  # httpx would raise RuntimeError
            raise ReplicaError(f"{path} failed: the engine was closed")
        limit = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, params=params, timeout=limit)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ReplicaError(f"{path} failed: {type(error).__name__}: {error}") from error
        if response.status_code == 400 and path == self._sample_path:
            raise EngineError(f"{self.name} refuses a request: {error_message(response)}")
        if not response.is_success:
            raise ReplicaError(f"{path} answered {response.status_code}: {error_message(response)}")
        return response

    async def close(self) -> None:
        await self._client.aclose()


def error_message(response: httpx.Response) -> str:
    """Return the first line of the error message in an answer, cut to 200 characters."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except ValueError:
        text = response.text
    return text.strip().partition("\n")[0][:200]
