"""An HTTP server in the event loop of the caller.

The number of connections is limited. A connection is closed if it is idle, or if the headers of a request arrive late.
"""

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
"""The limit on open files, divided by this number, is a limit on connections. A connection takes one open file, or two
if its client runs in this process. So open files are always left for the rest of the program."""

KEEP_ALIVE_SECONDS = 75
"""Seconds after which the server closes an idle connection. Clients usually have a shorter limit, such as 5 seconds in
httpx, so the client closes an idle connection first."""

CLOSE_SECONDS = 5.0
"""Seconds that a closed server waits for the requests in progress."""


class HttpServer:
    """A uvicorn server for an application at a port. The constructor starts the server."""

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
    """Raise the limit on open files if necessary. Return the number of connections that the limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS * FILES_PER_CONNECTION
    if resource.RLIM_INFINITY != soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # some systems permit less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // FILES_PER_CONNECTION)


class _Protocol(LimitedHeadersProtocol):
    """A connection that is closed if there are too many connections or the headers arrive too late."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.close()
