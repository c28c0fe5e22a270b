"""Launchers that start ranks and vLLM servers in Ray actors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.trainer.rank_connection import KEY_VARIABLE, RankListener
from agent_r1.trainer.ranks import RankDied, StartedRank
from agent_r1.training.placement.ray_actors import RankActor, ServerActor
from agent_r1.training.placement.ray_cluster import RayCluster
from agent_r1.training.vllm_servers import StartedServer, server_environment

POLL_SECONDS = 0.5

CALL_SECONDS = 60.0


class RayRanks:
    """A :class:`agent_r1.trainer.ranks.RankLauncher` that starts each rank in a Ray actor of its own."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def start(self, ranks: int) -> list[StartedRank]:
        """Start the ranks, and wait until all of them have connected to this process.

        Raise RankDied if a rank ends before its connection. Raise InvalidInput if not all ranks have connected within
        ``placement.start_seconds``.
        """
        processes: list[RayRankProcess] = []
        with closing(RankListener(self._cluster.host)) as listener:
            host, port = listener.address
            environment = {KEY_VARIABLE: listener.key, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            try:
                for rank in range(ranks):
                    arguments = ["-m", "agent_r1.trainer.rank_process", host, str(port), str(rank)]
                    processes.append(RayRankProcess(self._cluster, rank, arguments, environment))
                pipes = self._accept(listener, processes)
            except BaseException:
                for process in processes:
                    process.kill()
                raise
        hosts = self._cluster.hosts
        return [StartedRank(pipes[k], process, hosts[k], gpu=0) for k, process in enumerate(processes)]

    def _accept(self, listener: RankListener, processes: Sequence[RayRankProcess]) -> dict[int, Connection]:
        pipes: dict[int, Connection] = {}
        deadline = time.monotonic() + self._cluster.seconds
        while len(pipes) < len(processes):
            if (accepted := listener.accept(POLL_SECONDS)) is not None:
                pipes |= dict([accepted])
            for rank, process in enumerate(processes):
                if rank not in pipes and process.has_ended:
                    raise RankDied(f"rank {rank} of the trainer ended before it connected to the run")
            if time.monotonic() > deadline:
                got = f"{len(pipes)} of {len(processes)} ranks within {self._cluster.seconds:g} s"
                raise InvalidInput("placement.start_seconds", got=got, do="give more, or read the logs of Ray")
        return pipes


class RayRankProcess:
    """A :class:`agent_r1.trainer.ranks.RankProcess` that runs in a Ray actor."""

    def __init__(self, cluster: RayCluster, rank: int, arguments: list[str], environment: dict[str, str]) -> None:
        self._ray, self._actor = cluster.ray, cluster.start_actor(rank, RankActor, arguments, environment)
        self._pid, self._end = self._actor.pid.remote(), self._actor.wait.remote()

    @property
    def pid(self) -> int:
        """The id of the process on its machine; 0 if the actor ended before it started the process."""
        try:
            return int(self._ray.get(self._pid))
        except self._ray.exceptions.RayError:
            return 0

    @property
    def has_ended(self) -> bool:
        ended, _ = self._ray.wait([self._end], timeout=0)
        return bool(ended)

    def kill(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.kill.remote(), timeout=CALL_SECONDS)
        self._ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """Wait at most ``timeout`` seconds until the rank ends. Return the exit code of the rank.

        The exit code is -9 if the rank's Ray actor was killed.
        """
        try:
            return int(self._ray.get(self._end, timeout=timeout))
        except self._ray.exceptions.RayActorError:
            return -signal.SIGKILL


class RayServers:
    """A :class:`agent_r1.training.vllm_servers.ServerLauncher` that starts each server in a Ray actor of its own."""

    def __init__(self, cluster: RayCluster, weights_folder: Path | None) -> None:
        self._cluster, self._weights_folder = cluster, weights_folder

    def start(self, number: int, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        index = self._cluster.num_ranks + number
        host = self._cluster.hosts[index]
        if host != self._cluster.host and self._weights_folder is None:
            do = f"name a folder that {host} mounts under the same path: a server there reads weights from it"
            raise InvalidInput("engine.vllm.weights_folder", got="nothing", do=do)
        actor = self._cluster.start_actor(index, ServerActor)
        port = self._cluster.ray.get(actor.free_port.remote(host))
        self._cluster.ray.get(actor.start.remote(command(host, port), server_environment(None), log))
        return StartedServer(f"http://{host}:{port}", RayServerProcess(self._cluster.ray, actor, log))


class RayServerProcess:
    """A :class:`agent_r1.inference.server_process.Server`: a vLLM server that runs in a Ray actor."""

    def __init__(self, ray: Any, actor: Any, log: Path) -> None:
        self._ray, self._actor, self.log = ray, actor, log

    @property
    def is_running(self) -> bool:
        return bool(self._call(self._actor.is_running, otherwise=False))

    def kill(self) -> None:
        self._call(self._actor.kill, otherwise=None)

    def stop(self) -> None:
        self._call(self._actor.stop, otherwise=None)
        self._ray.kill(self._actor)

    def last_words(self) -> str:
        return str(self._call(self._actor.last_words, otherwise="its Ray actor ended"))

    def _call(self, method: Any, otherwise: object) -> object:
        try:
            return self._ray.get(method.remote(), timeout=CALL_SECONDS)
        except self._ray.exceptions.RayError:
            return otherwise
