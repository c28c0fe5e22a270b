"""A retriever on another machine, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import ValidationError

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.protocol import MAX_QUERIES, BatchReply, Health
from agent_r1.retrieval.retriever import TOP_K, Found, RetrieverFailed

SECONDS = 10.0
"""How long the server may take for one request."""

TRIES = 3
BACKOFF = 0.25
"""Seconds before the second try; twice as long before each further one."""


class RemoteRetriever:
    """Searches with a retrieval server (``agent-r1 retriever``); many queries are one request.

    A request that finds no server, breaks off, takes too long or meets an error of the server is tried again, then
    raises RetrieverFailed. One that the server refuses raises AgentR1Error at once.
    """

    def __init__(self, address: str, seconds: float = SECONDS, tries: int = TRIES, backoff: float = BACKOFF) -> None:
        # trust_env: a proxy for the outside world must not be asked for a machine beside this one.
        self._client = httpx.Client(base_url=address, timeout=seconds, trust_env=False)
        self._address, self._tries, self._backoff = address, tries, backoff

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        found: Found = []
        for start in range(0, len(queries), MAX_QUERIES):
            some = [_valid(query) for query in queries[start : start + MAX_QUERIES]]
            reply = self._reply(self._request("POST", "/search/batch", {"queries": some, "k": k}))
            if len(reply.results) != len(some):
                raise RetrieverFailed(f"{self._address} answered {len(reply.results)} of {len(some)} queries")
            found += [tuple(Passage(each.title, each.text) for each in result) for result in reply.results]
        return found

    def health(self) -> Health:
        """What the server says of itself. Raises RetrieverFailed where there is none, or it is another kind."""
        try:
            return Health.model_validate_json(self._request("GET", "/health", None).content)
        except ValidationError as error:
            raise RetrieverFailed(f"{self._address} is no retrieval server") from error

    def _reply(self, response: httpx.Response) -> BatchReply:
        try:
            return BatchReply.model_validate_json(response.content)
        except ValidationError as error:
            raise RetrieverFailed(f"{self._address} answered something else than passages") from error

    def _request(self, method: str, path: str, asked: Any) -> httpx.Response:
        body = None if asked is None else json.dumps(asked).encode()
        reason = ""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                response = self._client.request(method, path, content=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            reason = f"status {response.status_code}: {response.text[:200]}"
            if response.is_client_error:
                raise AgentR1Error(f"the retrieval server at {self._address} refused the request ({reason})")
        raise RetrieverFailed(f"the retrieval server at {self._address} did not answer ({reason})")


def open_remote(address: str) -> RemoteRetriever:
    """A retriever at ``address``, which has been seen to be there. Raises InvalidInput."""
    try:
        remote = RemoteRetriever(address)
        remote.health()
    except (AgentR1Error, httpx.InvalidURL) as error:
        do = f"start one there with agent-r1 retriever ({error})"
        raise InvalidInput("retrieval server", got=address, do=do) from error
    return remote


def _valid(query: str) -> str:
    """Lone surrogates, which an agent may write and JSON cannot carry, become question marks."""
    return query.encode("utf-8", "replace").decode("utf-8")
