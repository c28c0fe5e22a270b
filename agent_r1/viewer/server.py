"""The server of the viewer: uvicorn on the loopback address, until a signal stops it."""

from __future__ import annotations

import secrets

import uvicorn
from starlette.types import ASGIApp

from agent_r1.viewer.guard import Guard
from agent_r1.web import ThreadedServer, listen

HOST = "127.0.0.1"
DRAIN_SECONDS = 2
"""Seconds that a stopped server waits for the requests in progress."""


class ViewerServer(ThreadedServer):
    """A server on the loopback address of this machine. It answers only browsers that know a secret text, the token.

    Args:
        app: the application to serve.
        port: the port to listen on; 0 for any free port.

    Attributes:
        port: the port that the server listens on.
        url: the address with which a browser opens the first page. The address contains the token.

    Raises:
        InvalidInput: the port cannot be used.
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
        """Return the address with which a browser opens the page at ``path``. The address contains the token."""
        return f"http://{HOST}:{self.port}{path}?token={self._token}"
