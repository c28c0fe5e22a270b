"""Ranks: processes of this machine that compute together, and the caller that controls them.

When the process that started a rank ends or is killed, the pipe of requests is closed. A thread of the rank notices
this and ends the rank.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
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
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from agent_r1.core.errors import AgentR1Error

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""If a rank waits longer than this for the other ranks, it fails."""

GRACE_SECONDS = 5.0
"""Seconds to wait, after one rank has failed, for reports that other ranks failed or ended before it."""


class RankFailed(AgentR1Error):
    """Raised if a rank raised an exception other than an AgentR1Error, or if the process of a rank ended."""


class RankDied(RankFailed):
    """Raised if the process of a rank ended.

    Attributes:
        event: which rank ended, and how, such as "rank 1 of the trainer (process 71) was killed by SIGKILL".
    """

    def __init__(self, event: str) -> None:
        self.event = event
        super().__init__(f"{event}; continue the run from its last checkpoint with --resume")


class RankProcess(Protocol):
    """The process of a rank. :class:`subprocess.Popen` implements this protocol."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended. It is -N if signal N ended the process."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank among all ranks."""

    rank: int
    ranks: int
    device: str
    """The type of the device: ``cpu`` or ``cuda``."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The result of a request that raised an exception.

    ``error`` is the exception if it is an AgentR1Error; otherwise None. ``message`` is the exception in one line, and
    ``trace`` is its traceback.
    """

    error: AgentR1Error | None
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a rank's process. ``code`` is the exit code, or -N if signal N ended the process."""

    rank: int
    code: int


class _Endings:
    """The ends of the processes of all ranks, in the order in which they were noticed.

    The end of a rank breaks its connections to the other ranks. They can abort because of this, even before the end of
    the first rank is noticed.
    """

    def __init__(self) -> None:
        self._ends: list[_End] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def watch(self, rank: int, process: RankProcess) -> None:
        """Wait for the end of a process in a new thread. No other code may wait for this process."""
        self._threads.append(threading.Thread(target=self._wait, args=(rank, process), daemon=True))
        self._threads[-1].start()

    def cause(self) -> _End:
        """Wait until a process has ended, and return the first end that is not an abort.

        If all ranks that end within ``GRACE_SECONDS`` were aborted, the first abort is returned.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ends)
            self._changed.wait_for(self._not_aborted, GRACE_SECONDS)
            return next(iter(self._not_aborted()), self._ends[0])

    def _not_aborted(self) -> list[_End]:
        return [end for end in self._ends if end.code != -signal.SIGABRT]

    def join(self) -> None:
        """Wait until all processes have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection can call this in any thread
                thread.join()

    def _wait(self, rank: int, process: RankProcess) -> None:
        end = _End(rank, process.wait())
        with self._changed:
            self._ends.append(end)
            self._changed.notify_all()


def start_process(pipe: Connection) -> RankProcess:
    """Start the process of a rank, which reads requests from ``pipe``.

    The process has a process group of its own, so that Ctrl-C in a terminal does not reach it.
    """
    descriptor = pipe.fileno()
    words = [sys.executable, "-m", "agent_r1.trainer.ranks", str(descriptor)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(words, pass_fds=[descriptor], stdin=subprocess.DEVNULL, env=environment, process_group=0)


class RankGroup(Generic[T]):
    """Processes that each hold an object, and that run the same requests on their objects together.

    If a request fails on one rank, all ranks end, because the other ranks can be in the middle of an exchange of
    tensors.

    Args:
        ranks: the number of processes.
        device: the type of their devices, ``cpu`` or ``cuda``. Rank k uses the GPU number k.
    """

    def __init__(self, ranks: int, device: str) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[RankProcess] = []
        self._endings = _Endings()
        self._end = weakref.finalize(self, _end_all, self._pipes, self._processes, self._endings)
        for rank in range(ranks):
            here, there = Pipe()
            self._pipes.append(here)
            self._processes.append(start_process(there))
            self._endings.watch(rank, self._processes[rank])
            there.close()
        places = [pickle.dumps(Place(rank, ranks, device)) for rank in range(ranks)]
        self._send(0, places[0])
        port = self._receive([0])[0]
        for rank, place in list(enumerate(places))[1:]:
            self._send(rank, place)
            self._send(rank, pickle.dumps(port))
        self._receive(range(ranks))  # the ranks are connected

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, in the order of the ranks."""
        return [process.pid for process in self._processes]

    def start(self, make: Callable[[], T]) -> None:
        """Call ``make()`` on each rank. The result becomes the object of the rank and replaces the previous object."""
        self._request(_Start(make))

    def call(self, request: Callable[[T], Any]) -> list[Any]:
        """Call ``request(object)`` on each rank, and return the results in the order of the ranks.

        The request and the results are pickled.

        Raises:
            AgentR1Error: the error that the request raised on a rank, if it has this type.
            RankDied: the process of a rank ended.
            RankFailed: a rank raised another error.
        """
        return self._request(request)

    def _request(self, request: Callable[[T], Any] | _Start[T]) -> list[Any]:
        message = pickle.dumps(request)
        for rank in range(len(self._pipes)):
            self._send(rank, message)
        return self._receive(range(len(self._pipes)))

    def close(self) -> None:
        """End all ranks. Further calls raise RankFailed."""
        self._end()

    def _send(self, rank: int, message: bytes) -> None:
        # Pickled by the caller, because a pipe would share the memory of tensors between processes, not copy them.
        if not self._end.alive:
            raise RankFailed("the ranks of the trainer have ended")
        try:
            self._pipes[rank].send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._explain_end() from None

    def _receive(self, ranks: Sequence[int]) -> list[Any]:
        results: dict[int, Any] = {}
        while pending := [rank for rank in ranks if rank not in results]:
            readable = wait([self._pipes[rank] for rank in pending])
            for rank in pending:
                if self._pipes[rank] in readable:
                    results[rank] = self._result(rank)
                    if isinstance(results[rank], _Failure):
                        raise self._explain_failure(rank, results[rank], set(ranks) - results.keys())
        return [results[rank] for rank in ranks]

    def _result(self, rank: int) -> Any:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):  # OSError: it ended in the middle of its answer
            raise self._explain_end() from None

    def _explain_failure(self, rank: int, failure: _Failure, others: set[int]) -> AgentR1Error:
        """End all ranks, and return the error that explains why a request failed on ``rank``.

        A request also fails on ``rank`` if the process of another rank has ended, because the connection is lost. Then
        the returned error is about the process that ended.

        Args:
            rank: the rank on which the request failed.
            failure: the failure of ``rank``.
            others: the ranks that have not answered yet.
        """
        if failure.error is not None:
            self.close()
            return failure.error
        if self._has_ended(others):
            return self._explain_end()
        self.close()
        error = RankFailed(f"rank {rank} of the trainer failed: {failure.message}")
        error.__cause__ = RuntimeError(f"traceback of rank {rank}:\n{failure.trace}")
        return error

    def _has_ended(self, ranks: Collection[int]) -> bool:
        """Return whether one of ``ranks`` ends within ``GRACE_SECONDS`` without an answer to its request."""
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
        """End all ranks, and return an error about the rank that ended first. At least one must have ended."""
        end = self._endings.cause()
        process = self._processes[end.rank].pid
        self.close()
        how = f"was killed by {signal.Signals(-end.code).name}" if end.code < 0 else f"ended with exit code {end.code}"
        return RankDied(f"rank {end.rank} of the trainer (process {process}) {how}")


def _end_all(pipes: Sequence[Connection], processes: Sequence[RankProcess], endings: _Endings) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.kill()
    endings.join()


@dataclass(frozen=True, slots=True)
class _Start(Generic[T]):
    """A request: call ``make()``, and replace the object of the rank with the result."""

    make: Callable[[], T]


def serve_rank(pipe: Connection) -> None:
    """Join the other ranks, then answer requests until the pipe is closed. Then end the process."""
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
    """A rank: it holds an object and handles requests for this object."""

    def __init__(self) -> None:
        self._held: Any = None

    def handle(self, request: Callable[[Any], object] | _Start[Any]) -> object:
        if isinstance(request, _Start):
            self._held = None  # frees its memory first
            self._held = request.make()
            return None
        return request(self._held)


def _answer(work: Callable[[], object]) -> bytes:
    """Return the result of ``work()`` as pickled bytes. If ``work()`` raises, the result is a :class:`_Failure`."""
    try:
        return pickle.dumps(work())
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        own = error if isinstance(error, AgentR1Error) else None
        return pickle.dumps(_Failure(own, message, traceback.format_exc()))


def _read_requests(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the caller closed the pipe, or has ended


def _join(place: Place, pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """Connect this rank with the other ranks. All sockets are on the loopback interface.

    Rank 0 sends the port at which it listens to ``pipe``. The other ranks read this port from ``requests``.
    """
    interface = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    if place.rank == 0:
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        descriptor = listening.detach()
        store = dist.TCPStore(
            LOOPBACK, port, place.ranks, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        pipe.send_bytes(pickle.dumps(port))
    else:
        store = dist.TCPStore(LOOPBACK, pickle.loads(requests.get()), place.ranks, is_master=False)
    if place.device == "cuda":
        import torch

        torch.cuda.set_device(place.rank)
    backend = "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT)


if __name__ == "__main__":
    # The module is imported by its name, so that its classes are those that requests name.
    from agent_r1.trainer import ranks

    ranks.serve_rank(Connection(int(sys.argv[1])))
