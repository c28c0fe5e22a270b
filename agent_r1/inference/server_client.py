"""HTTP requests to one inference server."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from agent_r1.core.errors import EngineError
from agent_r1.core.redaction import redact_url

CONNECT_SECONDS = 10.0
"""The time limit for opening a connection and for a health check, in seconds."""


class ReplicaError(EngineError):
    """Raised if a server fails.

    Examples: the server cannot be reached, reports an internal error, or sends an answer that does not fit the request.
    """


class ServerClient:
    """A client of the inference server at ``url``, without a limit on connections and without proxies.

    ``sample_path`` is the path of the endpoint that samples tokens.

    Raises:
        ReplicaError: (any request) the server failed. Another server can take the request.
        EngineError: (a request to ``sample_path``) the server refuses the request with status 400.
    """

    def __init__(self, url: str, sample_path: str) -> None:
        self.name = redact_url(url)
        self._sample_path = sample_path
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(base_url=url, limits=limits, trust_env=False)

    async def get(self, path: str, *, seconds: float) -> httpx.Response:
        return await self._send("GET", path, None, None, seconds)

    async def post(
        self, path: str, body: object = None, *, params: Mapping[str, str] | None = None, seconds: float | None = 60.0
    ) -> httpx.Response:
        return await self._send("POST", path, body, params, seconds)

    async def _send(
        self, method: str, path: str, body: object, params: Mapping[str, str] | None, seconds: float | None
    ) -> httpx.Response:
        if self._client.is_closed:  # httpx would raise RuntimeError
            raise ReplicaError(f"{path} failed: the engine was closed")
        limit = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, params=params, timeout=limit)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ReplicaError(f"{path} failed: {type(error).__name__}: {error}") from error
        if response.status_code == 400 and path == self._sample_path:
            raise EngineError(f"{self.name} refuses a request: {error_message(response)}")
        if not response.is_success:
            raise ReplicaError(f"{path} answered {response.status_code}: {error_message(response)}")
        return response

    async def close(self) -> None:
        await self._client.aclose()


def error_message(response: httpx.Response) -> str:
    """Return the first line of the error message in an answer, cut to 200 characters."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error["message"] if isinstance(error, dict) and "message" in error else error)
    except ValueError:
        text = response.text
    return text.strip().partition("\n")[0][:200]
