"""The retrieval server: one search for many machines, over HTTP (see ``protocol``).

Built on the standard library's HTTP server, so that it costs no dependency: a thread per connection, connections and
sizes bounded. It is meant for machines that trust each other; it knows neither passwords nor TLS.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agent_r1.core.errors import InvalidInput
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.protocol import MAX_BODY, Batch, BatchReply, Health, Query, Refusal, Reply, Shown
from agent_r1.retrieval.retriever import Retriever

Message = TypeVar("Message", bound=BaseModel)

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
IDLE_SECONDS = 60.0
"""A connection that says nothing for so long is closed."""

DRAIN_SECONDS = 10.0
"""How long requests under way may take when the server is stopped."""


class Refused(Exception):
    """A request that cannot be answered, with the status to say so."""

    def __init__(self, status: HTTPStatus, error: str) -> None:
        super().__init__(error)
        self.status = status


class RetrieverServer(ThreadingHTTPServer):
    """Serves ``retriever`` at (host, port). Searches run one at a time, each with all the cores it takes.

    Raises InvalidInput where the address cannot be used.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], retriever: Retriever, health: Health) -> None:
        self.retriever, self.health = retriever, health
        self._searching = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle = threading.Condition()
        self._requests = 0
        try:
            super().__init__(address, Handler)
        except OSError as error:
            got = f"{address[0]}:{address[1]}"
            raise InvalidInput("address", got=got, do=f"choose another --host or --port ({error.strerror})") from error

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def search(self, queries: tuple[str, ...], k: int) -> tuple[tuple[Shown, ...], ...]:
        with self._searching:
            found = self.retriever.search(queries, k)
        return tuple(tuple(map(_shown, passages)) for passages in found)

    @contextmanager
    def request_under_way(self) -> Iterator[None]:
        with self._idle:
            self._requests += 1
        try:
            yield
        finally:
            with self._idle:
                self._requests -= 1
                self._idle.notify_all()

    def drain(self) -> bool:
        """Wait until no request is under way, for a while; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: self._requests == 0, DRAIN_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Each connection takes a place; where none is left it is closed at once, and its client tries again."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        _log.debug("connection from %s broke", client_address, exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RetrieverServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    wbufsize = -1  # headers and body leave together: apart, each answer would wait for the client's delayed ACK
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer({"/health": lambda: self.server.health})

    def do_POST(self) -> None:
        self._answer({"/search": self._search, "/search/batch": self._batch})

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def _answer(self, routes: dict[str, Callable[[], BaseModel]]) -> None:
        with self.server.request_under_way():
            status = HTTPStatus.OK
            try:
                reply = self._route(routes)()
            except Refused as refused:
                status, reply = refused.status, Refusal(error=str(refused))
            except Exception as error:  # whatever a search raises: the server lives on
                _log.exception("a search failed")
                status, reply = HTTPStatus.INTERNAL_SERVER_ERROR, Refusal(error=f"{type(error).__name__}: {error}")
            self._send(status, json.dumps(reply.model_dump(mode="python")).encode())

    def _route(self, routes: dict[str, Callable[[], BaseModel]]) -> Callable[[], BaseModel]:
        if self.path not in routes:
            self.close_connection = True  # a body that is not read would be taken for the next request
            raise Refused(HTTPStatus.NOT_FOUND, f"{self.command} {self.path[:100]}: there is {', '.join(routes)}")
        return routes[self.path]

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _search(self) -> Reply:
        asked = _read(Query, self._body())
        (passages,) = self.server.search((asked.query,), asked.k)
        return Reply(passages=passages)

    def _batch(self) -> BatchReply:
        asked = _read(Batch, self._body())
        return BatchReply(results=self.server.search(asked.queries, asked.k))

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        self.close_connection = True  # unless the body is read to its end
        if not text.isascii() or not text.isdigit():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "give a Content-Length")
        if int(text) > MAX_BODY:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"give at most {MAX_BODY} bytes")
        body = self.rfile.read(int(text))
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        return body


def _read(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refused(HTTPStatus.BAD_REQUEST, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, "the body is not JSON") from error


def _shown(passage: Passage) -> Shown:
    return Shown(title=passage.title, text=passage.text)
