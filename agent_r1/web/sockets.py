"""Open the sockets on which servers listen."""

from __future__ import annotations

import socket

from agent_r1.core.errors import InvalidInput

BACKLOG = 256


def listen(host: str, port: int, do: str = "choose another --host or --port") -> socket.socket:
    """Return a TCP socket that listens at ``host`` and ``port``. Port 0 means any free port.

    Raise InvalidInput if the address cannot be used. The argument ``do`` is the advice in the error's message.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a domain name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput("address", got=f"{host}:{port}", do=f"{do} ({reason})") from error
    return listening
