"""The server of the viewer, on the loopback address."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_r1.web import ThreadedServer, listen

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")
"""The pattern of accepted host names, against DNS rebinding.

Any port is accepted: a tunnel can have a different port.
"""

MAX_URL = 4096
"""The largest number of bytes in a path with its query."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every response. They forbid resources from another origin, and scripts inside a page."""


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that passes on the requests of the user's own browser, and refuses all other requests.

    A request needs the token in its cookie, a host name of this machine, and the method GET or HEAD without a body. The
    user gets the cookie from an address with ``token=TOKEN`` in its query. The guard then redirects the browser to the
    address without the token.

    ``cookie`` is the name of the cookie. The name contains the port, because browsers share cookies between all ports
    of a host: with equal names, two viewers would overwrite each other's cookie.
    """

    app: ASGIApp
    token: str
    cookie: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(scope)
        await (self.app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not _LOOPBACK.fullmatch(headers.get("host", "")):
            return _refusal(400, "this host name is not served; open the address that agent-r1 view printed")
        if scope["method"] not in ("GET", "HEAD"):
            return _refusal(405, "only GET is answered", {"Allow": "GET, HEAD"})
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _refusal(413, "send no body")
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URL:
            return _refusal(414, f"the address is longer than {MAX_URL} bytes")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given is not None and self._is_token(given[0]):
            response = RedirectResponse(_address_without_token(scope), status_code=303)
            # "lax" and not "strict": the browser sends the cookie if the user follows a link on a page of another site,
            # such as a terminal in the browser. Such a link does no harm, because no GET request changes anything, and
            # the other site cannot read the page. Embedded in other pages, the viewer still gets no cookie.
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
            return response
        if not self._is_token(_cookie(headers, self.cookie)):
            return _refusal(403, "the token is missing or wrong; open the address that agent-r1 view printed")
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode())


def _address_without_token(scope: Scope) -> str:
    # A browser takes the beginning of "//name/" or "/\name/" for the name of another host.
    path = "/" + quote(scope["raw_path"], safe="/%:@!$&'()*+,;=").lstrip("/")
    rest = [pair for pair in parse_qsl(scope["query_string"].decode("latin-1"), True) if pair[0] != "token"]
    return path + ("?" + urlencode(rest) if rest else "")


def _cookie(headers: Headers, name: str) -> str:
    for part in headers.get("cookie", "").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _refusal(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    # After a refusal the connection is closed, because the rest of an unread body would be parsed as the next request.
    return PlainTextResponse(f"{line}\n", status, {"Connection": "close", **(headers or {})})


HOST = "127.0.0.1"
DRAIN_SECONDS = 2
"""How long a stopped server waits for the requests in progress."""


class ViewerServer(ThreadedServer):
    """A server on loopback, which answers only browsers that know a secret access token.

    Raise InvalidInput if ``port`` cannot be used; 0 stands for any free port.

    Attributes:
        port: the port that the server listens on.
        url: the address of the first page, including the access token.
    """

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        listening = listen(HOST, port, do="choose another --port; --port 0 takes any free one")
        self.port: int = listening.getsockname()[1]
        self._token = secrets.token_urlsafe(24)
        self.url = self.address("/")
        config = uvicorn.Config(
            Guard(app, self._token, f"agent_r1_view_{self.port}"),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        super().__init__(listening, config, "viewer")

    def address(self, path: str) -> str:
        """Return the address of the page at ``path``, including the access token."""
        return f"http://{HOST}:{self.port}{path}?token={self._token}"
