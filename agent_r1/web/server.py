"""A uvicorn server inside another program, with a time limit for the headers of requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEADER_SECONDS = 30.0
"""The time limit for the headers of a request, in seconds."""


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ThreadedServer:
    """A server that runs in the caller's thread (``run``), or in its own thread during a ``with`` block.

    ``run`` blocks until another thread or a signal handler calls ``stop``. Then ``run`` answers the requests in
    progress, closes the server's socket, and returns.

    Args:
        listening: the socket on which the server accepts connections.
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

    A connection is closed if the headers of a request take more than ``HEADER_SECONDS``. For the first request, the
    time starts with the connection. For a later request, the time starts with the request's first byte. A connection is
    also closed if the client does not read the answer for ``HEADER_SECONDS``.
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
        if self.cycle is previous and not self.transport.is_closing():
            self.transport.close()
