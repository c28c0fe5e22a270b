"""The process of a rank: it joins the other ranks, answers requests, and ends when its caller ends.

python -m agent_r1.trainer.rank_process DESCRIPTOR        reads requests from an inherited pipe
python -m agent_r1.trainer.rank_process HOST PORT RANK    connects to the caller, with the key AGENT_R1_RANK_KEY;
                                                          ends when its standard input is closed
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import pickle
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from agent_r1.core.errors import AgentR1Error, InvalidInput

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
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)

SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, slots=True)
class Place:
    """The index of a rank (from 0), the number of ranks, and the machine and device of the rank."""

    rank: int
    ranks: int
    device: str
    """``cpu`` or ``cuda``."""
    host: str
    """The address at which the other ranks reach this rank."""
    gpu: int
    """The index of the rank's GPU. It has no effect if the device is ``cpu``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a request raised. ``error`` is None if the exception is no AgentR1Error."""

    error: AgentR1Error | None
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class Start(Generic[T]):
    """A request to a rank: keep the result of ``make()``, and pass this result to each later request."""

    make: Callable[[], T]


def serve_rank(pipe: Connection) -> None:
    """Join the other ranks, and answer the requests from ``pipe`` until the pipe is closed. Then end the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # signals reach all processes; the caller decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    # a pass returns views of its tensors; nothing changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    rank = _Rank()
    try:
        pipe.send_bytes(_answer(lambda: _join(pickle.loads(requests.get()), pipe, requests)))
        while True:  # a request is not kept in a variable: it can hold a whole model
            pipe.send_bytes(_answer(lambda: rank.handle(pickle.loads(requests.get()))))
    except OSError:
        os._exit(0)  # the pipe was closed during the request


class _Rank:
    """The state of a rank: an object that the request :class:`Start` makes, and that later requests use."""

    def __init__(self) -> None:
        self._held: Any = None

    def handle(self, request: Callable[[Any], object] | Start[Any]) -> object:
        if isinstance(request, Start):
            self._held = None  # frees its memory first
            self._held = request.make()
            return None
        return request(self._held)


def _answer(work: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps(work())
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        own = error if isinstance(error, AgentR1Error) else None
        return pickle.dumps(Failure(own, message, traceback.format_exc()))


def _read_requests(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the caller closed the pipe, or has ended


def _join(place: Place, pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = find_interface(place.host)
    if place.rank == 0:
        listening = socket.create_server((place.host, 0))
        host, port = place.host, listening.getsockname()[1]
        descriptor = listening.detach()
        store = dist.TCPStore(
            host, port, place.ranks, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        pipe.send_bytes(pickle.dumps((host, port)))
    else:
        host, port = pickle.loads(requests.get())
        store = dist.TCPStore(host, port, place.ranks, is_master=False)
    if place.device == "cuda":
        import torch

        torch.cuda.set_device(place.gpu)
    backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT)


def find_interface(host: str) -> str:
    """Return the name, such as "lo", of the network interface that has the IPv4 address ``host``.

    Raise InvalidInput if no interface of this machine has the address.
    """
    if ipaddress.ip_address(host).is_loopback:
        return "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    raise InvalidInput("placement", got=host, do="give each machine of the cluster its own address")


def _pipe(arguments: list[str]) -> Connection:
    if len(arguments) == 1:
        return Connection(int(arguments[0]))
    threading.Thread(target=_end_with_input, daemon=True).start()
    host, port, rank = arguments
    return connect_rank((host, int(port)), os.environ.pop(KEY_VARIABLE), int(rank))


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    # The module is imported by its name, so that its classes are those that requests name.
    from agent_r1.trainer import rank_process

    rank_process.serve_rank(_pipe(sys.argv[1:]))
