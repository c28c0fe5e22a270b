"""The retrieval server: one index for many machines, over HTTP.

The server has no passwords and no TLS, so use it only between machines that trust each other. On a loopback address,
only loopback host names are accepted, against DNS rebinding.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent_r1.retrieval.client import (
    MAX_BODY,
    RETRIEVE,
    BatchRequest,
    BatchResponse,
    Document,
    ErrorResponse,
    Health,
    PassageText,
    RetrieveRequest,
    RetrieveResponse,
    ScoredDocument,
    SearchRequest,
    SearchResponse,
    build_index,
)
from agent_r1.retrieval.config import RetrieverConfig, check
from agent_r1.retrieval.retriever import TOP_K, Found, Passage, Retriever, read_corpus
from agent_r1.web import LimitedHeadersProtocol, RefusedBody, ThreadedServer, listen, read_body

Message = TypeVar("Message", bound=BaseModel)

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
BODY_SECONDS = 30.0
"""The time limit for the body of a request, in seconds."""

IDLE_SECONDS = 60
"""Seconds after which an idle connection is closed."""

DRAIN_SECONDS = 10
"""Seconds that a stopped server waits for the requests in progress."""

QUERIES_PER_SEARCH = 16
"""The largest number of queries in one search. A request with more queries is divided into several searches.

One long search would block other requests for seconds.
"""


class _RequestError(Exception):
    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def create_app(retriever: Retriever, health: Health, allowed_hosts: Sequence[str]) -> Starlette:
    """Return the web application of the retrieval server.

    Searches run one at a time, because one search can use several cores. ``health`` is the answer to requests for
    ``/health``. ``allowed_hosts`` are the accepted values of the header ``Host``.
    """
    searching = asyncio.Lock()

    async def search(queries: tuple[str, ...], k: int) -> tuple[tuple[PassageText, ...], ...]:
        found: Found = []
        for start in range(0, len(queries), QUERIES_PER_SEARCH):
            async with searching:
                found += await asyncio.to_thread(retriever.search, queries[start : start + QUERIES_PER_SEARCH], k)
        return tuple(tuple(map(_passage_text, passages)) for passages in found)

    async def get_health(request: Request) -> BaseModel:
        return health

    async def post_search(request: Request) -> BaseModel:
        query = await _read(SearchRequest, request)
        (passages,) = await search((query.query,), query.k)
        return SearchResponse(passages=passages)

    async def post_batch(request: Request) -> BaseModel:
        batch = await _read(BatchRequest, request)
        return BatchResponse(results=await search(batch.queries, batch.k))

    async def post_retrieve(request: Request) -> BaseModel:
        asked = await _read(RetrieveRequest, request)
        results = [tuple(map(_document, found)) for found in await search(asked.queries, asked.topk or TOP_K)]
        if not asked.return_scores:
            return RetrieveResponse(result=tuple(results))
        return RetrieveResponse(result=tuple(map(_by_rank, results)))

    routes = [
        Route("/health", _answering(get_health), methods=["GET"]),
        Route("/search", _answering(post_search), methods=["POST"]),
        Route("/search/batch", _answering(post_batch), methods=["POST"]),
        Route(RETRIEVE, _answering(post_retrieve), methods=["POST"]),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts))])
    app.add_exception_handler(404, lambda request, error: _error(404, f"no such path; use {_paths(routes)}"))
    app.add_exception_handler(405, lambda request, error: _error(405, f"no such method; use {_paths(routes)}"))
    return app


def _answering(handler: Callable[[Request], Awaitable[BaseModel]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return JSONResponse((await handler(request)).model_dump(mode="python"))
        except _RequestError as error:
            return _error(error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone and does not read the response
        except Exception as error:  # after any error of a search the server continues
            _log.exception("a search failed")
            return _error(500, f"{type(error).__name__}: {error}")

    return endpoint


def _error(status: int, line: str) -> Response:
    # After a refusal the connection is closed, because the rest of an unread body would be parsed as the next request.
    headers = {"Connection": "close"} if status < 500 else None
    return JSONResponse(ErrorResponse(error=line).model_dump(), status, headers)


def _paths(routes: Sequence[Route]) -> str:
    return ", ".join(f"{' '.join(sorted((route.methods or set()) - {'HEAD'}))} {route.path}" for route in routes)


async def _read(kind: type[Message], request: Request) -> Message:
    try:
        return kind.model_validate(json.loads(await read_body(request, MAX_BODY, BODY_SECONDS)))
    except RefusedBody as error:
        raise _RequestError(error.status, str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _RequestError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise _RequestError(400, "the body is not JSON") from error


def _passage_text(passage: Passage) -> PassageText:
    return PassageText(title=passage.title, text=passage.text)


def _document(passage: PassageText) -> Document:
    return Document(contents=f'"{passage.title}"\n{passage.text}', title=passage.title, text=passage.text)


def _by_rank(documents: Sequence[Document]) -> tuple[ScoredDocument, ...]:
    # Retrievers return no scores. What programs do with them, such as a threshold, depends on the retriever anyway.
    return tuple(ScoredDocument(document=each, score=1 / rank) for rank, each in enumerate(documents, start=1))


class RetrievalServer(ThreadedServer):
    """An HTTP server that searches with a retriever.

    Args:
        retriever: finds passages.
        health: the answer to requests for ``/health``.
        host: the address at which the server listens.
        port: the port at which the server listens. 0 means any free port.
        allowed_hosts: the host names that are accepted in requests. If ``allowed_hosts`` is empty, the accepted names
            depend on ``host``. At a loopback address, only loopback names are accepted. At any other address, all names
            are accepted.

    Raises:
        InvalidInput: the server cannot listen at this address and port.
    """

    def __init__(
        self,
        retriever: Retriever,
        health: Health,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        listening = listen(host, port)
        self.host, self.port = listening.getsockname()[:2]
        app = create_app(retriever, health, allowed_hosts or _default_hosts(host))
        config = uvicorn.Config(
            app,
            http=LimitedHeadersProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS + 1,  # uvicorn refuses requests while this many connections are open
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        super().__init__(listening, config, "retrieval server")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def _default_hosts(host: str) -> tuple[str, ...]:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    return ("localhost", "127.0.0.1", "[::1]", host) if loopback else ("*",)


def serve(config: RetrieverConfig, on_started: Callable[[str, Health], None]) -> None:
    """Run the retrieval server until SIGTERM or SIGINT arrives, then answer the requests in progress.

    ``on_started(address, health)`` is called when the server listens. Raises InvalidInput if ``config`` cannot be used.
    """
    check(config)
    if config.encoder:
        import torch  # a BM25 server does not need torch

        torch.set_num_threads(config.threads)
    passages = read_corpus(config.corpus)
    health = Health(status="ok", passages=len(passages), search=config.encoder or "bm25")
    server = RetrievalServer(build_index(config, passages), health, config.host, config.port, config.allowed_hosts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: server.stop())
    on_started(server.url, health)
    server.run()
