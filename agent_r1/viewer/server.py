"""The server of the viewer, on the loopback address."""

from __future__ import annotations

import secrets

import uvicorn
from starlette.types import ASGIApp

from agent_r1.viewer.guard import Guard
from agent_r1.web import ThreadedServer, listen

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
