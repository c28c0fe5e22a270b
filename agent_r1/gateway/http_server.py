"""An HTTP server in the event loop of the caller, which idle connections cannot exhaust."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from agent_r1.core.sockets import listen
from agent_r1.core.tasks import shared_task

MAX_CONNECTIONS = 4096
FILES_PER_CONNECTION = 4
"""How many open files the process may have for each connection. Agents in the process open its other end."""

REQUEST_SECONDS = 30.0
"""The time limit for the headers of a request, in seconds. It begins with the connection, or with the first byte of a
later request."""

KEEP_ALIVE_SECONDS = 75
"""How long a connection can be idle, in seconds. Clients give theirs up earlier, so that they use no closed one."""

CLOSE_SECONDS = 5.0
"""How long a closed server waits for the requests in progress, in seconds."""


class HttpServer:
    """A uvicorn server that listens on a port and serves an application. It starts when the object is created."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._socket = listen(host, port, "choose another --port")
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=_max_connections(),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(CLOSE_SECONDS),
        )
        self._uvicorn = _Uvicorn(config)
        self._serving = shared_task(self._uvicorn.serve(sockets=[self._socket]))

    async def close(self) -> None:
        self._uvicorn.should_exit = True
        await self._serving
        self._socket.close()


def _max_connections() -> int:
    """Return the largest number of connections that the limit on open files permits. Raise this limit if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS * FILES_PER_CONNECTION
    if resource.RLIM_INFINITY != soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # some systems permit less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // FILES_PER_CONNECTION)


class _Protocol(H11Protocol):
    """A connection. It is closed if there are too many, or if the headers of a request take ``REQUEST_SECONDS``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.close()
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        was_idle = self.timeout_keep_alive_task is not None  # uvicorn removes the limit of an idle connection
        super().data_received(data)
        if was_idle:
            self._limit_headers()

    def _limit_headers(self) -> None:
        self.loop.call_later(REQUEST_SECONDS, self._close_without_request, self.cycle)

    def _close_without_request(self, previous: RequestResponseCycle | None) -> None:
        if self.cycle is previous:
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers, because the run installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
