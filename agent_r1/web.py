"""Shared parts of the HTTP servers: the gateway, the retrieval server, environment workers and the viewer."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from agent_r1.core.errors import InvalidInput


class RefusedBody(Exception):
    """Raised if the body of a request exceeds a limit."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request. Raise RefusedBody if it is too large or does not arrive in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise RefusedBody(413, f"send at most {max_bytes} bytes")
    except TimeoutError:
        raise RefusedBody(408, f"the body did not arrive within {seconds:g} s") from None
    return bytes(body)


HEADER_SECONDS = 30.0
"""The time limit for the headers of a request."""


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ThreadedServer:
    """A server that runs in the caller's thread (``run``), or in its own thread during a ``with`` block.

    ``run`` blocks until another thread or a signal handler calls ``stop``. Then it answers the requests in progress.
    """

    def __init__(self, listening: socket.socket, config: uvicorn.Config, name: str) -> None:
        self._socket = listening
        self._server = EmbeddedServer(config)
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def run(self) -> None:
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()


class LimitedHeadersProtocol(H11Protocol):
    """The HTTP/1.1 protocol of uvicorn, with time limits against slow clients.

    A connection is closed if the headers of a request, counted from its first byte or from the start of the connection,
    take more than ``HEADER_SECONDS``, or if the client does not read the answer for this time.
    """

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        was_idle = self.timeout_keep_alive_task is not None  # uvicorn removes the limit of an idle connection
        super().data_received(data)
        if was_idle:
            self._limit_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the closed connection would wait for the client to read the rest

    def _limit_headers(self) -> None:
        self.loop.call_later(HEADER_SECONDS, self._close_without_request, self.cycle)

    def _close_without_request(self, previous: RequestResponseCycle | None) -> None:
        is_websocket = self.transport.get_protocol() is not self
        if self.cycle is previous and not is_websocket and not self.transport.is_closing():
            self.transport.close()


BACKLOG = 256


def listen(host: str, port: int, do: str = "choose another --host or --port") -> socket.socket:
    """Return a TCP socket that listens at ``host`` and ``port``. Port 0 means any free port.

    Raise InvalidInput, with the advice ``do``, if the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a domain name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput("address", got=f"{host}:{port}", do=f"{do} ({reason})") from error
    return listening


MAX_CONNECTIONS = 4096
FILES_PER_CONNECTION = 4
"""The limit on open files, divided by this number, is a limit on connections. A connection takes one open file, or two
if its client runs in this process. So open files are always left for the rest of the program."""

KEEP_ALIVE_SECONDS = 75
"""After this time, an idle connection is closed. Clients usually have a shorter limit, such as 5 seconds in httpx, so
the client closes it first."""

CLOSE_SECONDS = 5.0
"""The time that a closed server waits for the requests in progress."""


class BackgroundServer:
    """A uvicorn server for an application, which runs as a task of the current event loop."""

    def __init__(self, app: Starlette, host: str, port: int, lifespan: Literal["on", "off"] = "off") -> None:
        self._socket = listen(host, port, "choose another --port")
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan=lifespan,
            ws_max_size=256 * 2**10,  # bytes: a longer action would hold up all sessions while it is rendered
            server_header=False,
            limit_concurrency=_max_connections(),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(CLOSE_SECONDS),
        )
        self._uvicorn = EmbeddedServer(config)
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))

    async def close(self) -> None:
        self._uvicorn.should_exit = True
        await self._serving
        self._socket.close()


def _max_connections() -> int:
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
