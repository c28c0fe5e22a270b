"""Shared parts of the HTTP servers: the gateway, the retrieval server, environment workers and the viewer."""

from agent_r1.web.body import RefusedBody, read_body
from agent_r1.web.http_server import HttpServer
from agent_r1.web.server import EmbeddedServer, LimitedHeadersProtocol, ThreadedServer
from agent_r1.web.sockets import listen

__all__ = [
    "EmbeddedServer",
    "HttpServer",
    "LimitedHeadersProtocol",
    "RefusedBody",
    "ThreadedServer",
    "listen",
    "read_body",
]
