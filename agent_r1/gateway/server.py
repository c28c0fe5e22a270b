"""The gateway: an HTTP server on loopback through which agents call models. Each API key gives access to one model.

A request without a valid key is refused before its body is read. The server accepts only loopback host names, so that a
web page cannot reach the server by DNS rebinding.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agent_r1.gateway.anthropic_messages import ANTHROPIC_MESSAGES
from agent_r1.gateway.chat import ChatAnswer, ChatModel, Dialect, DialectRequest, Json, RequestError, event, warn_once
from agent_r1.gateway.chat_completions import CHAT_COMPLETIONS, error_json
from agent_r1.gateway.coalescing import AnswerLog, PendingAnswer, key_ended
from agent_r1.gateway.responses import RESPONSES
from agent_r1.gateway.streams import POLL_SECONDS, complete_parts, live_parts
from agent_r1.web import BackgroundServer, RefusedBody, read_body

log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (CHAT_COMPLETIONS, RESPONSES, ANTHROPIC_MESSAGES)

HOST = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The host names that the server accepts in requests."""

NO_PROXY = ("no_proxy", "NO_PROXY")
"""The environment variables that list the hosts which clients reach without a proxy."""

MAX_BODY = 32 * 2**20
"""The largest body of a request, in bytes. A client sends all images of a conversation with each request."""

BODY_SECONDS = 30.0
"""The time limit for the arrival of a request's body, in seconds."""

MAX_WAITING = 1024
"""The largest number of waiting requests per API key."""

KEPT_ANSWERS = 64
"""How many complete answers are kept per API key, for repeated requests."""

EVENT_STREAM = "text/event-stream"

NO_RETRY = {"X-Should-Retry": "false"}
"""The header that stops the client libraries of OpenAI and Anthropic from repeating a request."""


@dataclass(slots=True)
class _Access:
    """The model to which an API key gives access, and the requests with this key."""

    model: ChatModel
    answers: AnswerLog
    turnstile: asyncio.Semaphore  # lets at most model.max_concurrent requests be read or answered at the same time
    num_waiting: int = 0  # requests that wait for the turnstile

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        if self.num_waiting + self.answers.num_in_progress >= self.model.max_concurrent + MAX_WAITING:
            raise RequestError(429, "too many requests wait", code="rate_limit_exceeded", can_retry=True)
        self.num_waiting += 1
        try:
            await self.turnstile.acquire()
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self.turnstile.release()


class Gateway:
    """An HTTP server for models, on the loopback address.

    Each API key gives access to one model until the key is revoked.

    Args:
        port: the port to listen on; 0 for any free port.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._accesses: dict[bytes, _Access] = {}
        self._server: BackgroundServer | None = None

    @property
    def base_url(self) -> str:
        """The base URL for the client libraries of OpenAI, such as ``http://127.0.0.1:8123/v1``."""
        if self._server is None:
            raise RuntimeError("the gateway was not started")
        return f"http://{HOST}:{self._server.port}/v1"

    def register(self, model: ChatModel, key: str | None = None) -> str:
        """Allow requests with the API key ``key`` to use ``model``, and return the key.

        If ``key`` is None, a new key is made.
        """
        key = key or f"sk-{secrets.token_urlsafe(32)}"
        answers = AnswerLog(model, KEPT_ANSWERS)
        self._accesses[_hash(key)] = _Access(model, answers, asyncio.Semaphore(model.max_concurrent))
        return key

    def revoke(self, key: str) -> None:
        """Make an API key invalid. Requests in progress with this key fail with HTTP status 401."""
        self._accesses.pop(_hash(key)).answers.close()

    async def start(self) -> None:
        """Start to answer requests in the event loop of the caller, if the gateway was not started yet."""
        if self._server is None:
            self._server = BackgroundServer(self._app(), HOST, self._port)
            _bypass_proxy()

    async def close(self) -> None:
        """Stop the server. Requests in progress have a few seconds to end. The gateway can be started again."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    def _app(self) -> Starlette:
        routes = [
            Route(path, _endpoint(dialect, answer), methods=["POST"])
            for dialect in DIALECTS
            for answer, paths in ((self._answer, dialect.paths), (self._count, dialect.count_paths))
            for path in paths
        ]
        routes += [Route(path, self._list_models, methods=["GET"]) for path in ("/v1/models", "/v1/models/{name:path}")]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False  # a redirect would answer before the key and the host are checked
        app.add_exception_handler(HTTPException, _refuse_path)
        return app

    async def _answer(self, request: Request, dialect: Dialect) -> Response:
        access = self._authenticate(request)
        # bodies are large: a key cannot make the server read more of them at a time than it has requests
        async with access.admit():
            self._authenticate(request)  # the key can have ended meanwhile
            body = await _read(request)
            given = dialect.read(_parse(body))
            for argument in given.chat.ignored:
                warn_once(f"the agent sends {argument}, which has no effect")
            digest = hashlib.sha256(request.url.path.encode() + b"\n" + body).digest()
            pending = access.answers.submit(given.chat, digest, _num_retries(request))
            with pending.waiting():
                await _wait(pending, given.streams, request)
        if not pending.drafting.done():
            return _LiveResponse(given, dialect, pending)
        response = _response(given, pending.answer)
        pending.deliver()  # only now, because an answer without a response would be a turn that the agent never saw
        return response

    async def _count(self, request: Request, dialect: Dialect) -> Response:
        access = self._authenticate(request)
        async with access.admit():
            self._authenticate(request)
            body = _parse(await _read(request))
            given = dialect.read({"max_tokens": 1, **body})  # a count has no limit of tokens
            return JSONResponse({"input_tokens": await access.model.count_tokens(given.chat)})

    def _authenticate(self, request: Request) -> _Access:
        if _host_name(request.headers.get("host", "")) not in HOSTS:
            raise RequestError(421, "the header Host has to be a loopback name", code="invalid_host")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        access = self._accesses.get(_hash(key))
        if access is None:
            message = "this API key is not valid, or its episode has ended"
            raise RequestError(401, message, code="invalid_api_key")
        return access

    async def _list_models(self, request: Request) -> Response:
        try:
            model = self._authenticate(request).model
        except RequestError as error:
            return _error_response(error_json(error), error)
        entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "agent-r1"}
        if (name := request.path_params.get("name")) is not None:
            return JSONResponse({**entry, "id": name})
        return JSONResponse({"object": "list", "data": [entry]})


def _endpoint(
    dialect: Dialect, answer: Callable[[Request, Dialect], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request, dialect)
        except RequestError as error:
            return _error_response(dialect.error(error), error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads this response
        except Exception:
            log.exception("a request to the gateway failed")
            failure = RequestError(500, "the gateway failed; its log has the reason")
            return _error_response(dialect.error(failure), failure)

    return endpoint


def _response(given: DialectRequest, answer: ChatAnswer) -> Response:
    if given.streams:
        events = chain.from_iterable(given.events(part) for part in complete_parts(answer))
        return Response("".join(events), media_type=EVENT_STREAM)
    return JSONResponse(given.to_json(answer))


class _LiveResponse(StreamingResponse):
    def __init__(self, given: DialectRequest, dialect: Dialect, pending: PendingAnswer) -> None:
        super().__init__(_live_events(given, dialect, pending), media_type=EVENT_STREAM)
        self._pending = pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The client waits for the answer from here on, not from the first event on: while the head of the response is
        # sent, an equal request would take the answer for an abandoned one.
        with self._pending.waiting(grace=0):
            await super().__call__(scope, receive, send)


async def _live_events(given: DialectRequest, dialect: Dialect, pending: PendingAnswer) -> AsyncIterator[str]:
    try:
        async for part in live_parts(pending.live, pending.drafting):
            for text in given.events(part):
                yield text
        pending.deliver()
    except RequestError as error:
        yield event(dialect.error(error), "error")


async def _wait(pending: PendingAnswer, streams: bool, request: Request) -> None:
    # Wait for the complete answer, or for the first token if the client and the model stream.
    disconnected = asyncio.create_task(_disconnection(request))
    try:
        while not pending.drafting.done() and not (streams and pending.live.start and pending.live.token_ids):
            poll = POLL_SECONDS if streams else None
            await asyncio.wait({pending.drafting, disconnected}, timeout=poll, return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():
                raise ClientDisconnect
        if pending.drafting.done() and pending.drafting.cancelled():
            raise key_ended()
    finally:
        disconnected.cancel()


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request) -> bytes:
    try:
        return await read_body(request, MAX_BODY, BODY_SECONDS)
    except RefusedBody as error:
        code = "request_too_large" if error.status == 413 else None
        raise RequestError(error.status, str(error), code=code) from None


def _parse(body: bytes) -> Json:
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
        if rb"\ud" in body.lower():  # an escape for half a character, which no tokenizer can encode
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not valid JSON in UTF-8") from None
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not a JSON object")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _num_retries(request: Request) -> int:
    text = request.headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0


def _bypass_proxy() -> None:
    listed = [host.strip() for name in NO_PROXY for host in os.environ.get(name, "").split(",") if host.strip()]
    if "*" not in listed:
        os.environ |= dict.fromkeys(NO_PROXY, ",".join(dict.fromkeys((*listed, HOST, "localhost"))))


def _host_name(host: str) -> str:
    return host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host


def _hash(key: str) -> bytes:
    # Keys are looked up by hash, so the time of a look-up reveals nothing about a key.
    return hashlib.sha256(key.encode()).digest()


def _refuse_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    paths = ", ".join(["GET /v1/models", *(f"POST {dialect.paths[0]}" for dialect in DIALECTS)])
    refusal = RequestError(status, f"there is no such request; there are: {paths}")
    return _error_response(error_json(refusal), refusal)


def _error_response(body: Json, error: RequestError) -> Response:
    # After a refusal the connection is closed, because the rest of an unread body would be read as the next request.
    headers = {"Connection": "close"} | ({} if error.can_retry else NO_RETRY)
    return JSONResponse(body, error.status, headers)
