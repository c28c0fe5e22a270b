"""Connections over TCP between the process of a run and ranks that another program started.

The run and the rank prove to each other that they know a key, before any byte is unpickled.
"""

from __future__ import annotations

import secrets
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

KEY_VARIABLE = "AGENT_R1_RANK_KEY"
"""The environment variable from which the process of a rank reads its key."""

PROOF_SECONDS = 30
"""The longest wait, in seconds, for each message in which a connecting rank proves that it knows the key."""

NUMBER = struct.Struct("!I")
"""The binary format of the first message that a rank sends. The message contains only the index of the rank."""


class RankListener:
    """A socket to which the ranks of one trainer connect. Close the socket when all ranks have connected.

    Attributes:
        address: host and port.
        key: the key that a rank needs, in hexadecimal digits.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_hex(32)
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()

    def accept(self, seconds: float) -> tuple[int, Connection] | None:
        """Return (index, connection) of the next rank that connects and proves that it knows the key.

        Return None if no client connects within ``seconds`` seconds, or if the next client does not know the key.
        """
        if not wait([self._socket], seconds):
            return None
        accepted, _ = self._socket.accept()
        with accepted:
            _set_limit(accepted, PROOF_SECONDS)
            pipe = _connection(accepted)
            try:
                deliver_challenge(pipe, self.key.encode())
                answer_challenge(pipe, self.key.encode())
                (rank,) = NUMBER.unpack(pipe.recv_bytes(NUMBER.size))
            except (OSError, EOFError, AuthenticationError, struct.error):
                pipe.close()
                return None
            _set_limit(accepted, 0)
            return rank, pipe

    def close(self) -> None:
        self._socket.close()


def connect_rank(address: tuple[str, int], key: str, rank: int) -> Connection:
    """Connect rank ``rank`` to the process of the run at ``address``, and return the connection.

    Raise AuthenticationError if the process of the run does not know ``key``.
    """
    with socket.create_connection(address) as connected:
        pipe = _connection(connected)
        answer_challenge(pipe, key.encode())
        deliver_challenge(pipe, key.encode())
        pipe.send_bytes(NUMBER.pack(rank))
        return pipe


def _connection(connected: socket.socket) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a small message does not wait for more
    return Connection(connected.dup().detach())


def _set_limit(connected: socket.socket, seconds: int) -> None:
    """Limit the seconds for which a read from the socket waits; 0 for no limit."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
