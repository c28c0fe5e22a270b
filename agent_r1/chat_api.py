"""A client of endpoints that answer chat completions in the format of OpenAI: for judges, and models behind an API."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import httpx

from agent_r1.core.errors import InvalidInput, shorten
from agent_r1.core.redaction import REDACTED, redact

MAX_ANSWER = 1_000_000
"""The maximum size of an answer, in bytes."""

MAX_REASON = 300
"""The maximum number of characters in the reason of a failure."""

MAX_PAUSE = 300.0
"""The longest pause between two requests, in seconds."""

RETRIED = (408, 409, 425, 429)
"""The HTTP statuses below 500 after which a request is repeated."""

CONNECT_SECONDS = 10.0

REPORT_SECONDS = 10  # at most one line in so many seconds, because many requests fail at once

Read = TypeVar("Read")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request got no usable answer."""

    reason: str
    is_final: bool = False  # whether a repeated request would fail too
    retry_after: float = 0.0  # the pause in seconds that the endpoint demands
    code: str = ""  # the endpoint's name of the error
    param: str = ""  # the endpoint's name of the argument that it refuses
    is_unreachable: bool = False  # whether no connection could be made


@dataclass(frozen=True, slots=True)
class Reply:
    """The first choice of a chat completion."""

    message: Mapping[str, Any]
    finish_reason: object
    prompt_tokens: int | None  # None if the endpoint does not report it
    completion_tokens: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ChatApi:
    """An endpoint of chat completions. The API key is never in a reason, a log or the representation of the object."""

    url: str  # the base address, such as http://127.0.0.1:8000/v1
    key: str = field(default="", repr=False)  # the API key; "": none is sent
    seconds: float = 60.0  # the time limit of one request
    tries: int = 3  # the maximum number of requests for one answer
    pause: float = 1.0  # seconds after the first failed request; each further pause is twice as long
    concurrency: int = 8  # requests at the same time
    slots: asyncio.Semaphore = field(init=False, repr=False)
    reported: set[int] = field(default_factory=set, init=False, repr=False)  # the periods with a line

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", asyncio.Semaphore(self.concurrency))

    async def check_reachable(self) -> None:
        """Raise InvalidInput if no connection to the endpoint can be made. A busy endpoint is reachable."""
        try:
            async with self._connect() as client:
                await client.get("models", timeout=httpx.Timeout(1.0, connect=CONNECT_SECONDS))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            got = self._redact(f"{self.url}, which cannot be reached: {error or type(error).__name__}")
            raise InvalidInput("api_url", got=got, do="start the server, or correct the address") from None
        except httpx.HTTPError:
            pass

    async def complete(self, body: bytes, read: Callable[[Reply], Read | Failure]) -> Read | Failure:
        """Send a request (JSON), and return what ``read`` makes of the reply.

        A request that fails, or whose reply ``read`` refuses with a Failure, is repeated until a failure is final or
        no tries are left.
        """
        failure = Failure("it was never asked")
        try:
            async with self._connect() as client:
                for attempt in range(self.tries):
                    if attempt:
                        pause = min(max(self.pause * 2 ** (attempt - 1), failure.retry_after), MAX_PAUSE)
                        if failure.is_unreachable:
                            self._report(f"try {attempt + 1} of {self.tries} in {pause:g} s")
                        await asyncio.sleep(pause)
                    async with self.slots:
                        reply = await self._ask(client, body)
                    result = read(reply) if isinstance(reply, Reply) else reply
                    if not isinstance(result, Failure):
                        return result
                    failure = result
                    if failure.is_final:
                        break
        except (httpx.InvalidURL, ValueError) as error:
            failure = Failure(f"{type(error).__name__}: {error}")
        return replace(failure, reason=self._redact(failure.reason))

    def _connect(self) -> httpx.AsyncClient:
        url = httpx.URL(self.url)
        credentials = (url.username, url.password) if url.userinfo else None
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        options: dict[str, Any] = {"timeout": self.seconds, "auth": credentials, "verify": _certificates()}
        # No redirects, which could lead the key to another host, and no proxy from the environment.
        return httpx.AsyncClient(base_url=url.copy_with(userinfo=b""), headers=headers, trust_env=False, **options)

    async def _ask(self, client: httpx.AsyncClient, body: bytes) -> Reply | Failure:
        try:
            async with asyncio.timeout(self.seconds), client.stream("POST", "chat/completions", content=body) as given:
                return await _read_response(given)
        except TimeoutError:
            return Failure(f"no answer within {self.seconds:g} seconds")
        except (httpx.HTTPError, httpx.StreamError) as error:
            unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            return Failure(f"{type(error).__name__}: {error}", is_unreachable=unreachable)

    def _report(self, next_try: str) -> None:
        if (period := int(time.monotonic() / REPORT_SECONDS)) not in self.reported:
            self.reported.add(period)
            log.warning("cannot connect to %s, %s", self._redact(self.url), next_try)

    def _redact(self, reason: str) -> str:
        # A server can repeat a wrong key in its errors.
        known = redact(reason.replace(self.key, REDACTED) if self.key else reason)
        return shorten(" ".join(known.split()), MAX_REASON)


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # reading them takes longer than a request on this machine


async def _read_response(response: httpx.Response) -> Reply | Failure:
    data = b""
    async for part in response.aiter_bytes():
        data += part
        if len(data) > MAX_ANSWER:
            return Failure(f"an answer of more than {MAX_ANSWER:,} bytes", is_final=True)
    try:
        # Half a character, which a server wrote as an escape, becomes a question mark.
        content = json.loads(json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        content = None
    text = data.decode("utf-8", "replace")
    if not response.is_success:
        return _refusal(response, text, content)
    try:
        choice, usage = content["choices"][0], content.get("usage")
        message, reason = dict(choice["message"]), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return Failure(f"an answer that is no chat completion: {text}")  # some servers report errors so
    return Reply(message, reason, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _refusal(response: httpx.Response, text: str, content: object) -> Failure:
    error = content.get("error") if isinstance(content, dict) else None
    code, param = (str(error.get(name) or "") if isinstance(error, dict) else "" for name in ("code", "param"))
    status, after = response.status_code, response.headers.get("Retry-After", "")
    pause = float(after) if after.isascii() and after.isdigit() else 0.0
    return Failure(f"status {status}: {text}", status < 500 and status not in RETRIED, pause, code, param)


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
