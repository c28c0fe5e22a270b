"""A client of a retrieval server, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import ValidationError

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.redaction import redact_url
from agent_r1.retrieval.protocol import MAX_QUERIES, BatchResponse, Health
from agent_r1.retrieval.retriever import TOP_K, Found, Passage, RetrievalError

SECONDS = 10.0
"""The time limit of one request, in seconds."""

TRIES = 3
BACKOFF = 0.25
"""Seconds before the second try. The time doubles before each later try."""


class RemoteRetriever:
    """A client of the retrieval server (``agent-r1 retriever``). One request carries many queries.

    A request is tried again after a failed connection, a time-out or a status 5xx. If the last try fails,
    RetrievalError is raised. After a status 4xx, AgentR1Error is raised at once.
    """

    def __init__(self, address: str, seconds: float = SECONDS, tries: int = TRIES, backoff: float = BACKOFF) -> None:
        url = httpx.URL(address)
        credentials = (url.username, url.password) if url.userinfo else None
        # Remove the user and the password from the address, because httpx logs the address. trust_env=False: requests
        # to a machine in the same network must not go through a proxy.
        address = str(url.copy_with(userinfo=b""))
        self._client = httpx.Client(base_url=address, auth=credentials, timeout=seconds, trust_env=False)
        self._address, self._tries, self._backoff = redact_url(address), tries, backoff

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        found: Found = []
        for start in range(0, len(queries), MAX_QUERIES):
            some = [_valid(query) for query in queries[start : start + MAX_QUERIES]]
            reply = self._reply(self._request("POST", "/search/batch", {"queries": some, "k": k}))
            if len(reply.results) != len(some):
                raise RetrievalError(f"{self._address} answered {len(reply.results)} of {len(some)} queries")
            found += [tuple(Passage(each.title, each.text) for each in result) for result in reply.results]
        return found

    def health(self) -> Health:
        """Return the number of passages on the server, and the server's kind of search."""
        try:
            return Health.model_validate_json(self._request("GET", "/health", None).content)
        except ValidationError as error:
            raise RetrievalError(f"{self._address} is not a retrieval server") from error

    def _reply(self, response: httpx.Response) -> BatchResponse:
        try:
            return BatchResponse.model_validate_json(response.content)
        except ValidationError as error:
            raise RetrievalError(f"{self._address} returned something other than passages") from error

    def _request(self, method: str, path: str, payload: Any) -> httpx.Response:
        body = None if payload is None else json.dumps(payload).encode()
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
        raise RetrievalError(f"the retrieval server at {self._address} did not answer ({reason})")


def open_remote(address: str) -> RemoteRetriever:
    """Return a retriever for the server at ``address``.

    Raises InvalidInput if the address is invalid, or if no retrieval server answers there.
    """
    try:
        remote = RemoteRetriever(address)
        remote.health()
    except (AgentR1Error, httpx.InvalidURL) as error:
        do = f"start one there with agent-r1 retriever ({error})"
        raise InvalidInput("retrieval server", got=address, do=do) from error
    return remote


def _valid(query: str) -> str:
    # Return the query with ``?`` instead of lone surrogates, which a model can write but UTF-8 cannot encode.
    return query.encode("utf-8", "replace").decode("utf-8")
