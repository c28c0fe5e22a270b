"""An HTTP server in the event loop of the caller. It limits the number of connections, and closes idle connections."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

from agent_r1.core.tasks import shared_task
from agent_r1.web.server import EmbeddedServer, LimitedHeadersProtocol
from agent_r1.web.sockets import listen

MAX_CONNECTIONS = 4096
FILES_PER_CONNECTION = 4
"""The number of open files that are reserved for each connection.

A connection of an agent in this process needs two files, because both of its ends are in this process.
"""

KEEP_ALIVE_SECONDS = 75
"""The time after which an idle connection is closed, in seconds.

Clients close their idle connections earlier. So no client sends a request on a connection that the server has closed.
"""

CLOSE_SECONDS = 5.0
"""The time that requests in progress have to end after the server is closed, in seconds."""


class HttpServer:
    """A uvicorn server that serves an application at a port. It starts when the object is created."""

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
        self._uvicorn = EmbeddedServer(config)
        self._serving = shared_task(self._uvicorn.serve(sockets=[self._socket]))

    async def close(self) -> None:
        self._uvicorn.should_exit = True
        await self._serving
        self._socket.close()


def _max_connections() -> int:
    """Return the largest number of connections that the limit on open files permits.

    If the limit is too low, the function first raises it as far as the system permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS * FILES_PER_CONNECTION
    if resource.RLIM_INFINITY != soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # some systems permit less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // FILES_PER_CONNECTION)


class _Protocol(LimitedHeadersProtocol):
    """A connection to the server.

    It is closed if the server has too many connections, or if the headers of a request take too long.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.close()
