"""Ranks: processes that compute together. The first half runs in the process of the run, the second in each rank.

python -m agent_r1.trainer.ranks DESCRIPTOR        reads requests from an inherited pipe
python -m agent_r1.trainer.ranks HOST PORT RANK    connects to the run, with the key AGENT_R1_RANK_KEY; ends when its
                                                   standard input is closed
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
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Pipe, answer_challenge, deliver_challenge, wait
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from agent_r1.core.errors import AgentR1Error, InvalidInput

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 5.0
"""How long to wait for the end of another rank after a failure: if a rank crashes, others fail, often noticed first."""

POLL_SECONDS = 1.0

SILENCE_MILLISECONDS = 120_000
"""The longest time that a message to a rank, or its answer, waits for a link that is cut."""

KEY_VARIABLE = "AGENT_R1_RANK_KEY"
"""The environment variable from which the process of a rank reads its key."""

PROOF_SECONDS = 30
"""The longest wait, in seconds, for each message in which a connecting rank proves that it knows the key."""

NUMBER = struct.Struct("!I")
"""The binary format of the first message that a rank sends. The message contains only the index of the rank."""

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


class RankFailed(AgentR1Error):
    """A rank raised an exception that is no AgentR1Error, or its process ended."""


class RankDied(RankFailed):
    """The process of a rank ended. ``event`` says which rank, and how."""

    def __init__(self, event: str) -> None:
        self.event = event
        super().__init__(f"{event}; continue the run from its last checkpoint with --resume")


class RankProcess(Protocol):
    """The process of a rank. :class:`subprocess.Popen` implements this protocol."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended. Return its exit code, or -N if signal N ended the process."""
        ...


class _Endings:
    """The exit codes of the rank processes that have ended, in the order in which their ends were noticed."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}  # rank -> exit code, or -N if signal N ended the process
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def watch(self, rank: int, process: RankProcess) -> None:
        self._threads.append(threading.Thread(target=self._wait, args=(rank, process), daemon=True))
        self._threads[-1].start()

    @property
    def has_any(self) -> bool:
        return bool(self._codes)

    def cause(self) -> tuple[int, int]:
        """Wait until a rank has ended. Return the rank and the exit code that explain why the ranks cannot go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._codes)
            # If one rank is killed, NCCL aborts the others, and an abort can be noticed before the kill.
            self._changed.wait_for(self._not_aborted, GRACE_SECONDS)
            return next(iter(self._not_aborted() or self._codes.items()))

    def _not_aborted(self) -> list[tuple[int, int]]:
        return [(rank, code) for rank, code in self._codes.items() if code != -signal.SIGABRT]

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection can call this in any thread
                thread.join()

    def _wait(self, rank: int, process: RankProcess) -> None:
        code = process.wait()
        with self._changed:
            self._codes[rank] = code
            self._changed.notify_all()


def start_process(pipe: Connection) -> RankProcess:
    """Start the process of a rank, which reads its requests from ``pipe``."""
    descriptor = pipe.fileno()
    words = [sys.executable, "-m", "agent_r1.trainer.ranks", str(descriptor)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # process_group=0: Ctrl-C in a terminal does not reach the process
    return subprocess.Popen(words, pass_fds=[descriptor], stdin=subprocess.DEVNULL, env=environment, process_group=0)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that was started and has not joined the other ranks yet."""

    pipe: Connection
    process: RankProcess
    host: str  # the address at which the other ranks reach the rank
    gpu: int  # the index of the rank's GPU among the GPUs that its process sees


class RankLauncher(Protocol):
    """A service that starts the processes of ranks, and returns them in the order of the ranks."""

    def start(self, ranks: int) -> list[StartedRank]: ...


class LocalRanks:
    """A :class:`RankLauncher` that starts child processes. Rank k uses GPU k."""

    def start(self, ranks: int) -> list[StartedRank]:
        return [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> StartedRank:
        here, there = Pipe()
        with there:
            return StartedRank(here, start_process(there), LOOPBACK, gpu=rank)


LOCAL_RANKS = LocalRanks()


class RankGroup(Generic[T]):
    """A group of processes (ranks). Each rank holds an object, and all ranks run the same requests on their objects."""

    def __init__(self, ranks: int, device: str, launcher: RankLauncher = LOCAL_RANKS) -> None:
        started = launcher.start(ranks)
        self._pipes: list[Connection] = [rank.pipe for rank in started]
        self._processes: list[RankProcess] = [rank.process for rank in started]
        self._endings = _Endings()
        self._end = weakref.finalize(self, _end_all, self._pipes, self._processes, self._endings)
        for rank, process in enumerate(self._processes):
            self._endings.watch(rank, process)
        places = [pickle.dumps(Place(k, ranks, device, rank.host, rank.gpu)) for k, rank in enumerate(started)]
        self._send(0, places[0])
        address = self._receive([0])[0]
        for rank, place in list(enumerate(places))[1:]:
            self._send(rank, place)
            self._send(rank, pickle.dumps(address))
        self._receive(range(ranks))  # the ranks are connected

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, make: Callable[[], T]) -> None:
        """Call ``make()`` on each rank. Each rank keeps the result as its object."""
        self.call(Start(make))

    def call(self, request: Callable[[T], Any] | Start[T]) -> list[Any]:
        """Call ``request`` on each rank, and return the results in the order of the ranks.

        Raise the request's own AgentR1Error, RankDied if a process ended, or else RankFailed.
        """
        message = pickle.dumps(request)
        for rank in range(len(self._pipes)):
            self._send(rank, message)
        return self._receive(range(len(self._pipes)))

    def call_one(self, rank: int, request: Callable[[T], Any]) -> Any:
        """Call ``request``, which needs no other rank, on one rank, and return the result. Raise as :meth:`call`."""
        self._send(rank, pickle.dumps(request))
        return self._receive([rank])[0]

    def close(self) -> None:
        """End all ranks. Later requests raise RankFailed."""
        self._end()

    def _send(self, rank: int, message: bytes) -> None:
        # Pickled by the caller, because a pipe would share the memory of tensors between processes, not copy them.
        if not self._end.alive:
            raise RankFailed("the ranks of the trainer have ended")
        try:
            self._pipes[rank].send_bytes(message)
        except OSError:
            raise self._explain_end() from None

    def _receive(self, ranks: Sequence[int]) -> list[Any]:
        results: dict[int, Any] = {}
        while pending := [rank for rank in ranks if rank not in results]:
            # A machine that loses its power closes no connection: the end of its process is noticed otherwise.
            readable = wait([self._pipes[rank] for rank in pending], POLL_SECONDS)
            if not readable and self._endings.has_any:
                raise self._explain_end()
            for rank in pending:
                if self._pipes[rank] in readable:
                    results[rank] = self._result(rank)
                    if isinstance(results[rank], Failure):
                        raise self._explain_failure(rank, results[rank], set(ranks) - results.keys())
        return [results[rank] for rank in ranks]

    def _result(self, rank: int) -> Any:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):  # OSError: it ended in the middle of its answer
            raise self._explain_end() from None

    def _explain_failure(self, rank: int, failure: Failure, others: set[int]) -> AgentR1Error:
        if failure.error is not None:
            self.close()
            return failure.error
        if self._has_ended(others):  # then the failure is only a consequence
            return self._explain_end()
        self.close()
        error = RankFailed(f"rank {rank} of the trainer failed: {failure.message}")
        error.__cause__ = RuntimeError(f"traceback of rank {rank}:\n{failure.trace}")
        return error

    def _has_ended(self, ranks: Collection[int]) -> bool:
        deadline = time.monotonic() + GRACE_SECONDS
        silent = [self._pipes[rank] for rank in ranks]
        while silent and (readable := wait(silent, max(0.0, deadline - time.monotonic()))):
            for pipe in [pipe for pipe in silent if pipe in readable]:
                silent.remove(pipe)
                try:
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    return True
        return False

    def _explain_end(self) -> RankDied:
        rank, code = self._endings.cause()
        process = self._processes[rank].pid
        self.close()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankDied(f"rank {rank} of the trainer (process {process}) {how}")


def _end_all(pipes: Sequence[Connection], processes: Sequence[RankProcess], endings: _Endings) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.kill()
    endings.join()


# The process of a rank


def serve_rank(pipe: Connection) -> None:
    """Join the other ranks, and answer the requests from ``pipe`` until the pipe is closed. Then end the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # signals reach all processes; the caller decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    # a pass returns views of its tensors; nothing changes them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    held: Any = None

    def handle(request: Callable[[Any], object] | Start[Any]) -> object:
        nonlocal held
        if isinstance(request, Start):
            held = None  # frees its memory first
            held = request.make()
            return None
        return request(held)

    try:
        pipe.send_bytes(_answer(lambda: _join(pickle.loads(requests.get()), pipe, requests)))
        while True:  # a request is not kept in a variable: it can hold a whole model
            pipe.send_bytes(_answer(lambda: handle(pickle.loads(requests.get()))))
    except OSError:
        os._exit(0)  # the pipe was closed during the request


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
    """Return the name, such as "lo", of the network interface that has the IPv4 address ``host``."""
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


class RankListener:
    """A socket to which the ranks of one trainer connect. Close the socket when all ranks have connected."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_hex(32)  # that each rank needs
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()

    def accept(self, seconds: float) -> tuple[int, Connection] | None:
        """Return (index, connection) of the next rank that knows the key; None if none connects in ``seconds``."""
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
    """Connect to the process of the run. Raise AuthenticationError if it does not know ``key``."""
    with socket.create_connection(address) as connected:
        pipe = _connection(connected)
        answer_challenge(pipe, key.encode())
        deliver_challenge(pipe, key.encode())
        pipe.send_bytes(NUMBER.pack(rank))
        return pipe


def _connection(connected: socket.socket) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a small message does not wait for more
    if sys.platform == "linux":  # else a message to a machine that is lost waits for a quarter of an hour
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MILLISECONDS)
    return Connection(connected.dup().detach())


def _set_limit(connected: socket.socket, seconds: int) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


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
    from agent_r1.trainer import ranks

    ranks.serve_rank(_pipe(sys.argv[1:]))
