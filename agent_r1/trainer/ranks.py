"""Start and control ranks. Ranks are processes that compute together."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, Protocol, TypeVar

from agent_r1.core.errors import AgentR1Error
from agent_r1.trainer.rank_process import Failure, Place, Start

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

GRACE_SECONDS = 5.0
"""The longest time, in seconds, to wait for the end of another rank's process after one rank has failed.

If the process of a rank crashes, other ranks fail too, and their failures are sometimes noticed before the crash. The
wait gives time to find the rank that crashed.
"""


class RankFailed(AgentR1Error):
    """Raised if a rank raises an exception that is no AgentR1Error, or if the process of a rank ends."""


class RankDied(RankFailed):
    """Raised if the process of a rank ends. ``event`` says which rank ended, and how."""

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


@dataclass(frozen=True, slots=True)
class _End:
    rank: int
    code: int


class _Endings:
    """A list of the rank processes that have ended."""

    def __init__(self) -> None:
        self._ends: list[_End] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def watch(self, rank: int, process: RankProcess) -> None:
        self._threads.append(threading.Thread(target=self._wait, args=(rank, process), daemon=True))
        self._threads[-1].start()

    def cause(self) -> _End:
        with self._changed:
            self._changed.wait_for(lambda: self._ends)
            self._changed.wait_for(self._not_aborted, GRACE_SECONDS)
            return next(iter(self._not_aborted()), self._ends[0])

    def _not_aborted(self) -> list[_End]:
        return [end for end in self._ends if end.code != -signal.SIGABRT]

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection can call this in any thread
                thread.join()

    def _wait(self, rank: int, process: RankProcess) -> None:
        end = _End(rank, process.wait())
        with self._changed:
            self._ends.append(end)
            self._changed.notify_all()


def start_process(pipe: Connection) -> RankProcess:
    """Start the process of a rank, which reads its requests from ``pipe``.

    Ctrl-C in a terminal does not reach the process.
    """
    descriptor = pipe.fileno()
    words = [sys.executable, "-m", "agent_r1.trainer.rank_process", str(descriptor)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(words, pass_fds=[descriptor], stdin=subprocess.DEVNULL, env=environment, process_group=0)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that was started and has not joined the other ranks yet.

    Attributes:
        host: the address at which the other ranks reach the rank.
        gpu: the index of the rank's GPU among the GPUs that its process sees.
    """

    pipe: Connection
    process: RankProcess
    host: str
    gpu: int


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
    """A group of processes (ranks). Each rank holds an object, and all ranks run the same requests on their objects.

    :meth:`start` makes the objects, and :meth:`call` runs a request. If a request fails on one rank, all ranks end.
    ``device`` is ``cpu`` or ``cuda``.
    """

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
        self._request(Start(make))

    def call(self, request: Callable[[T], Any]) -> list[Any]:
        """Call ``request`` on each rank. Return the results in the order of the ranks.

        Raises:
            AgentR1Error: the request raised this error on a rank.
            RankDied: the process of a rank ended.
            RankFailed: the request raised an exception that is no AgentR1Error.
        """
        return self._request(request)

    def _request(self, request: Callable[[T], Any] | Start[T]) -> list[Any]:
        message = pickle.dumps(request)
        for rank in range(len(self._pipes)):
            self._send(rank, message)
        return self._receive(range(len(self._pipes)))

    def close(self) -> None:
        """End all ranks. Later requests raise RankFailed."""
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
        if self._has_ended(others):
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
