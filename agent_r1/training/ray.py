"""Placement of a run on a Ray cluster: one Ray actor for each vLLM server, and one for each rank of the trainer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.files import TemporaryFolder
from agent_r1.inference.policy_engine import PREFIX
from agent_r1.inference.server_process import ReplicaError, ServerProcess, free_port
from agent_r1.model.folders import first_line
from agent_r1.trainer.rank_files import send_files, write_piece
from agent_r1.trainer.ranks import KEY_VARIABLE, RankDied, RankListener, StartedRank
from agent_r1.training.config import LOOPBACK, PlacementConfig, RunConfig, TrainConfig
from agent_r1.training.servers import Hardware, StartedServer, gpus_per_server, server_environment


def own_address() -> str:
    ray = import_extra("ray", "ray")
    return str(ray.util.get_node_ip_address())


class RankActor:
    """An actor that owns the process of a rank, and ends it when the actor ends."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,  # the rank ends when this actor ends, however it ends
            process_group=0,
        )

    def pid(self) -> int:
        return self._process.pid

    def address(self) -> str:
        """Return the address of the actor's machine in the cluster."""
        return own_address()

    def wait(self) -> int:
        """Wait until the rank ends, and return its exit code; -N if signal N ended the rank."""
        return self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ServerActor:
    """An actor that owns a vLLM server. A guard process kills the server if the actor ends.

    It also holds the copies of folders of weights on its machine, each below a temporary folder that has the path that
    it has on the machine of the run.
    """

    def __init__(self) -> None:
        self._roots: dict[Path, TemporaryFolder] = {}
        self._logs: Path | None = None

    def sees(self, file: Path) -> bool:
        return file.is_file()

    def begin(self, folder: Path) -> None:
        """Remove what is left of a folder, before its files are received."""
        root = folder.parent
        if root not in self._roots:
            root.parent.mkdir(parents=True, exist_ok=True)
            self._roots[root] = TemporaryFolder(PREFIX, root.parent, root.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def receive(self, file: Path, start: int, content: bytes) -> None:
        write_piece(file, start, content)

    def keep(self, root: Path, names: Sequence[str]) -> None:
        """Remove all folders below ``root`` whose names are not in ``names``."""
        for folder in root.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder)

    def free_port(self) -> tuple[str, int]:
        """Return the address of the actor's machine in the cluster, and a port that is free there."""
        return own_address(), free_port(own_address())

    def start(self, command: Sequence[str], log: Path) -> None:
        if not log.parent.is_dir():  # on the machine of the run, the run removes it
            log.parent.mkdir(parents=True)
            self._logs = log.parent
        self._process = ServerProcess(command, server_environment(None), log)

    def is_running(self) -> bool:
        return self._process.is_running

    def last_words(self) -> str:
        return self._process.last_words()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()
        for root in self._roots.values():
            root.remove()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)


LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If it is 0 when Ray is imported, Ray listens only at 127.0.0.1. It would replace a loopback address in its
arguments."""

TOKENS = "RAY_AUTH_MODE"
"""If it is ``token``, Ray accepts only callers that send a secret token, which is in the home folder."""

OBJECT_STORE = 80 * 2**20
"""The size of Ray's object store in bytes, at least 75 MiB. Pieces of files for other machines pass through it."""

CONNECT_SECONDS = 10.0

START_SECONDS = 300.0
"""Time limit in seconds for Ray to reserve the resources, and for the ranks to start."""

Resources = Mapping[str, float]
"""Amounts of resources by Ray's names, such as CPU and GPU."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources of one process of a run. ``what`` is the kind of process: "rank" or "vLLM server"."""

    what: str
    cpus: float
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """The requested resources in Ray's format, such as {"CPU": 1.0, "GPU": 1}."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}


def request_resources(config: RunConfig, cpus: float, hardware: Hardware, cluster: Resources) -> list[ResourceRequest]:
    """Return the resources that each process needs: first the ranks of the trainer, then the vLLM servers.

    Each rank needs a GPU if ``config.device`` begins with "cuda", or is "auto" and ``hardware`` has a GPU. Each server
    needs GPUs if the cluster has GPUs. ``cpus`` is the number of CPU cores for each process.
    """
    engine = config.engine
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and bool(hardware.gpus))
    ranks = config.trainer.ranks if isinstance(config, TrainConfig) and config.trainer.ranks > 1 else 0
    servers = engine.replicas if engine.backend == "vllm" and not engine.vllm.urls else 0
    if engine.vllm.devices:
        do = "leave it out: Ray chooses the GPUs"
        raise InvalidInput("engine.vllm.devices", got=",".join(engine.vllm.devices), do=do)
    if not ranks + servers:
        do = "give --trainer.ranks 2 or --engine.backend vllm with engine.vllm.python, or leave it out: Ray would start"
        raise InvalidInput("placement.launcher", got="ray", do=f"{do} nothing")
    size = gpus_per_server(engine) if cluster.get("GPU") else 0
    return [
        *[ResourceRequest("rank", cpus, int(on_gpu))] * ranks,
        *[ResourceRequest("vLLM server", cpus, size)] * servers,
    ]


def check_resources(requests: Sequence[ResourceRequest], nodes: Sequence[Resources]) -> None:
    """Raise InvalidInput if a Ray cluster has too few resources for the requests. Ray itself would only wait."""
    for name, unit in (("CPU", "CPU cores"), ("GPU", "GPUs")):
        amounts = [request.bundle.get(name, 0.0) for request in requests]
        total, largest = sum(node.get(name, 0.0) for node in nodes), max(node.get(name, 0.0) for node in nodes)
        got = f"{sum(amounts):g} {unit} for {describe(requests)}"
        less = "fewer trainer.ranks or engine.replicas" + (", or a smaller placement.cpus" if name == "CPU" else "")
        if sum(amounts) > total:
            raise InvalidInput("placement", got=got, do=f"give {less}: the Ray cluster has {total:g} {unit}")
        if max(amounts) > largest:
            do = f"give at most {largest:g} to one process: no node of the Ray cluster has more {unit}"
            raise InvalidInput("placement", got=f"{max(amounts):g} {unit} for one process", do=do)


def describe(requests: Sequence[ResourceRequest]) -> str:
    """Return the number of requested processes of each kind, such as "2 ranks, 1 vLLM server"."""
    counts = [(what, len(list(group))) for what, group in groupby(requests, lambda request: request.what)]
    return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts)


class RayCluster:
    """Reserved resources in a Ray cluster, for the actors of a run.

    If this object started Ray, Ray ends when this object is deleted or this process ends.
    """

    def __init__(self, run: RunConfig, config: PlacementConfig, hardware: Hardware) -> None:
        os.environ.setdefault(TOKENS, "token")
        if not config.address:
            os.environ.setdefault(LOOPBACK_ONLY, "0")
        self.ray = import_extra("ray", "ray")
        self._close = weakref.finalize(self, _connect(self.ray, config))
        self.host = config.host
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        self.requests = request_resources(run, config.cpus, hardware, self.ray.cluster_resources())
        check_resources(self.requests, [node["Resources"] for node in nodes])
        bundles, strategy = [request.bundle for request in self.requests], "SPREAD" if config.spread else "PACK"
        self._group = self.ray.util.placement_group(bundles, strategy=strategy)
        if not self._group.wait(START_SECONDS):
            free = {name: self.ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
            do = f"wait for other programs to end: {free['CPU']:g} CPU cores and {free['GPU']:g} GPUs are free"
            raise InvalidInput("placement", got=describe(self.requests), do=do)
        hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in nodes}
        where = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self.hosts = tuple(hosts[where[index]] for index in range(len(self.requests)))

    @property
    def num_ranks(self) -> int:
        """The number of processes in the cluster that are ranks of the trainer."""
        return sum(request.what == "rank" for request in self.requests)

    def start_actor(self, index: int, actor: type, *arguments: object) -> Any:
        """Return the handle of a new actor ``actor(*arguments)`` with the resources of ``self.requests[index]``."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        request = self.requests[index]
        options = {"num_cpus": request.cpus, "num_gpus": request.gpus, "max_concurrency": 4, "max_restarts": 0}
        return self.ray.remote(actor).options(scheduling_strategy=strategy, **options).remote(*arguments)

    def __str__(self) -> str:
        return f"{describe(self.requests)} on {', '.join(sorted(set(self.hosts)))}"


def _connect(ray: Any, config: PlacementConfig) -> Callable[[], None]:
    end = _begin(ray, config) if not ray.is_initialized() else lambda: None
    here = ray.util.get_node_ip_address()
    if here == config.host:
        return end
    end()
    if not config.address:
        do = f"set {LOOPBACK_ONLY}=0 before Ray is imported, so that it listens at {LOOPBACK} and not at {here}"
        raise InvalidInput("placement.launcher", got="ray", do=do)
    raise InvalidInput("placement.host", got=config.host, do=f"give {here}, this machine's address in the cluster")


def _begin(ray: Any, config: PlacementConfig) -> Callable[[], None]:
    options: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    folder: TemporaryFolder | None = None
    if config.address:
        _require_listener(config.address)
    else:
        folder = TemporaryFolder("agent-r1-ray-")
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "_temp_dir": str(folder.path)}

    def end() -> None:
        ray.shutdown()
        if folder is not None:
            folder.remove()

    try:
        with _kept_handler(signal.SIGTERM):
            ray.init(config.address or "local", **options)
    except Exception as error:
        end()
        do = f"read the logs of Ray, or use --placement.launcher processes ({' '.join(str(error).split())})"
        raise InvalidInput("placement.launcher", got="ray, which did not start", do=do) from error
    return end


def _require_listener(address: str) -> None:
    # Without this check, Ray would wait for minutes.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        do = f"give host and port of a Ray cluster that runs, such as 10.0.0.5:6379, or leave it out ({error})"
        raise InvalidInput("placement.address", got=address, do=do) from error


@contextmanager
def _kept_handler(number: int) -> Iterator[None]:
    # Restore the handler of the signal ``number`` after the ``with`` block, because Ray replaces the handler.
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


POLL_SECONDS = 0.5

CALL_SECONDS = 60.0


class RayRanks:
    """A :class:`agent_r1.trainer.ranks.RankLauncher` that starts each rank in a Ray actor of its own."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def start(self, ranks: int) -> list[StartedRank]:
        """Start the ranks, and wait until all have connected. Raise RankDied if a rank ends before it connects.

        An actor ends at once if Ray has not noticed yet that its machine is lost. Then all are started again.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self._start(ranks, deadline)
            except _ActorEnded:
                if time.monotonic() > deadline:
                    raise RankDied("the Ray actors of the ranks end again and again before they connect") from None
                time.sleep(POLL_SECONDS)

    def _start(self, ranks: int, deadline: float) -> list[StartedRank]:
        processes: list[RayRankProcess] = []
        with closing(RankListener(self._cluster.host)) as listener:
            host, port = listener.address
            environment = {KEY_VARIABLE: listener.key, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            try:
                for rank in range(ranks):
                    arguments = ["-m", "agent_r1.trainer.ranks", host, str(port), str(rank)]
                    processes.append(RayRankProcess(self._cluster, rank, arguments, environment))
                pipes = self._accept(listener, processes, deadline)
                return [StartedRank(pipes[k], process, process.host, gpu=0) for k, process in enumerate(processes)]
            except BaseException:
                for process in processes:
                    process.kill()
                raise

    def _accept(
        self, listener: RankListener, processes: Sequence[RayRankProcess], deadline: float
    ) -> dict[int, Connection]:
        pipes: dict[int, Connection] = {}
        while len(pipes) < len(processes):
            if (accepted := listener.accept(POLL_SECONDS)) is not None:
                pipes |= dict([accepted])
            for rank, process in enumerate(processes):
                if rank not in pipes and process.has_ended:
                    if process.actor_has_ended:
                        raise _ActorEnded
                    raise RankDied(f"rank {rank} of the trainer ended before it connected to the run")
            if time.monotonic() > deadline:
                got = f"{len(pipes)} of {len(processes)} ranks within {START_SECONDS:g} s"
                do = "start a machine in place of one that was lost, or continue with --resume and fewer trainer.ranks"
                raise InvalidInput("placement", got=got, do=f"{do}; the logs of Ray say more")
        return pipes


class _ActorEnded(Exception):
    """Raised if an actor ended, and not only the process of its rank."""


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
    def host(self) -> str:
        """The address of the process's machine in the cluster. Raise _ActorEnded if the machine is lost."""
        try:
            return str(self._ray.get(self._actor.address.remote(), timeout=CALL_SECONDS))
        except self._ray.exceptions.RayError as error:
            raise _ActorEnded from error

    @property
    def has_ended(self) -> bool:
        ended, _ = self._ray.wait([self._end], timeout=0)
        return bool(ended)

    @property
    def actor_has_ended(self) -> bool:
        try:
            self._ray.get(self._end, timeout=0)
        except self._ray.exceptions.ActorDiedError:
            return True
        except self._ray.exceptions.RayError:  # it has not ended, or cannot be reached for a while
            pass
        return False

    def kill(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.kill.remote(), timeout=CALL_SECONDS)
        self._ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """Wait at most ``timeout`` seconds until the rank ends. Return its exit code; -9 if its actor was killed."""
        while True:
            try:
                return int(self._ray.get(self._end, timeout=timeout))
            except self._ray.exceptions.ActorUnavailableError:  # it is out of reach for a while
                time.sleep(POLL_SECONDS)
                self._end = self._actor.wait.remote()
            except self._ray.exceptions.RayActorError:
                return -signal.SIGKILL


class RayServers:
    """A :class:`agent_r1.training.servers.ServerLauncher` that starts each server in a Ray actor of its own."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._copies: dict[str, WeightCopies] = {}  # by the address of the machine

    def start(self, number: int, model: Path, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        ray = self._cluster.ray
        actor = self._cluster.start_actor(self._cluster.num_ranks + number, ServerActor)
        host, port = ray.get(actor.free_port.remote())
        copies = self._copies.setdefault(host, WeightCopies(ray))
        copies.actors.append(actor)
        copies.deliver(model)
        ray.get(actor.start.remote(command(host, port), log))
        return StartedServer(f"http://{host}:{port}", RayServerProcess(ray, actor, log, copies))


class WeightCopies:
    """The copies of folders of weights on one machine, for all its servers. The first actor that lives holds them."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._lock = ray, threading.Lock()
        self.actors: list[Any] = []
        self._shared: dict[Path, bool] = {}  # whether the machine sees the files below a folder
        self._copied: dict[Path, int] = {}  # the time of the last change of a folder that was copied, in nanoseconds

    def deliver(self, folder: Path) -> None:
        """Copy a folder to its path on the machine, unless it is there. Raise ReplicaError if no actor lives there."""
        errors = self._ray.exceptions
        with self._lock:
            reason = "its actors have ended"
            while self.actors:
                try:
                    return self._copy(folder, self.actors[0])
                except errors.ActorDiedError as error:
                    reason = first_line(error)
                    self.actors.pop(0)
                    self._copied.clear()
                except errors.RayTaskError as error:  # such as no space left
                    reason = first_line(error.cause)
                    break
                except errors.RayError as error:
                    reason = first_line(error)
                    break
            raise ReplicaError(f"its machine did not get the weights: {reason}")

    def _copy(self, folder: Path, actor: Any) -> None:
        def call(method: Any, *arguments: object) -> Any:
            return self._ray.get(method.remote(*arguments), timeout=CALL_SECONDS)

        root, changed = folder.parent, folder.stat().st_mtime_ns
        if root not in self._shared:
            with tempfile.NamedTemporaryFile(dir=root) as probe:
                self._shared[root] = call(actor.sees, Path(probe.name))
        if self._shared[root] or self._copied.get(folder) == changed:
            return
        self._copied.pop(folder, None)
        call(actor.begin, folder)
        send_files(partial(call, actor.receive), sorted(folder.iterdir()))
        # what the run keeps of the older versions, a server can still be reading
        call(actor.keep, root, [one.name for one in root.iterdir()])
        self._copied[folder] = changed


class RayServerProcess:
    """A :class:`agent_r1.inference.server_process.Server`: a vLLM server that runs in a Ray actor."""

    def __init__(self, ray: Any, actor: Any, log: Path, copies: WeightCopies) -> None:
        self._ray, self._actor, self.log, self.deliver = ray, actor, log, copies.deliver

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
