"""The GPUs of the trainer and of each vLLM server of a run."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

import httpx
import torch

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.files import TemporaryFolder
from agent_r1.core.inference import AdapterFolders, InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.core.redaction import redact_url
from agent_r1.inference.canary import PROMPT_LENGTH
from agent_r1.inference.config import EngineConfig, VllmConfig
from agent_r1.inference.policy_engine import PolicyEngine, SharedPool, WeightFolders, write_weights
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.server_process import CONNECT_SECONDS, LOOPBACK, Server, ServerProcess, error_message, free_port
from agent_r1.inference.vllm import (
    CHECKSUM_OPTIONS,
    COLLECTIVE_RPC,
    LOAD_ADAPTER,
    SERVER_ENVIRONMENT,
    SERVER_OPTIONS,
    WORKER_FOLDER,
    VllmEngine,
    adapter_options,
)
from agent_r1.model.adapter import adapter_rank
from agent_r1.store.reader import result_event
from agent_r1.training.config import RunConfig, TrainConfig
from agent_r1.training.policy import Policy

VISIBLE = "CUDA_VISIBLE_DEVICES"

PARALLEL = r"(?:--(?:tensor|pipeline|data)[-_]parallel[-_]size|-tp|-pp|-dp)"
"""vLLM's options with a parallel size. The product of the sizes is the number of GPUs of a server."""

MEMORY_SHARE = r"(?<!\S)--gpu[-_]memory[-_]utilization[ =]"
"""A regular expression for the option that lets a vLLM server share a GPU with the trainer."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices that this process can use."""

    # the name of each GPU as in ``CUDA_VISIBLE_DEVICES``. ``gpus[k]`` is ``cuda:k`` in this process
    gpus: tuple[str, ...]
    cores: int  # the number of CPU cores


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The GPUs of a run, by torch's index in this process."""

    # one GPU for each rank of the trainer; () on a CPU. The embedded engine uses the first of these GPUs
    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]  # the GPUs of each vLLM server; () if the servers see all GPUs

    def __str__(self) -> str:
        named = [("trainer", self.trainer), *((f"server {k}", gpus) for k, gpus in enumerate(self.servers))]
        return ", ".join(f"{name}: GPU {_join(gpus)}" for name, gpus in named if gpus)


def find_hardware() -> Hardware:
    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    gpus = names[:count] if len(names) >= count else map(str, range(count))
    return Hardware(tuple(gpus), os.cpu_count() or 1)


def hardware_event() -> LogEvent:
    """Return an event with the processor, CPU cores, GPUs and torch version of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {
        "processor": processor_name(),
        "cores": find_hardware().cores,
        "gpus": gpus,
        "torch": str(torch.__version__),
    }
    return result_event("hardware", found)


def processor_name() -> str:
    """Return the name of this machine's processor, or "unknown"."""
    try:
        names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def plan_devices(config: RunConfig, hardware: Hardware) -> DevicePlan:
    """Return the GPUs of the trainer, and of vLLM servers: those of ``engine.vllm.devices``, or those that are left."""
    trainer = _trainer_gpus(config, hardware)
    engine, count = config.engine, len(hardware.gpus)
    if engine.backend != "vllm" or engine.vllm.urls:
        return DevicePlan(trainer, ())
    size = gpus_per_server(engine)
    if engine.vllm.devices:
        servers = tuple(_parse(engine.vllm.devices))
        _check_servers(config, servers, trainer, size, count)
        return DevicePlan(trainer, servers)
    if not count:
        return DevicePlan((), ())
    left = [gpu for gpu in range(count) if gpu not in trainer]
    if engine.replicas * size > len(left):
        got = f"{engine.replicas} vLLM servers of {size} GPU{'s' * (size > 1)}"
        do = f"give fewer, or fewer trainer.ranks: {count} GPUs are visible, and the trainer takes {len(trainer)}"
        raise InvalidInput("engine.replicas", got=got, do=do)
    return DevicePlan(trainer, tuple(tuple(left[k * size : (k + 1) * size]) for k in range(engine.replicas)))


def server_gpus(plan: DevicePlan, number: int, hardware: Hardware) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` for the vLLM server with the index ``number``; None if it sees all GPUs."""
    if not plan.servers:
        return None
    # if this process has no GPUs (torch for CPUs), it does not know their names: use the numbers
    return ",".join(hardware.gpus[gpu] if hardware.gpus else str(gpu) for gpu in plan.servers[number])


def gpus_per_server(engine: EngineConfig) -> int:
    """Return the number of GPUs that a vLLM server needs: the product of its parallel sizes in ``vllm.arguments``."""
    words = " ".join(shlex.split(engine.vllm.arguments))
    return prod(int(size) for size in re.findall(rf"(?<!\S){PARALLEL}[ =](\d+)", words))


def _trainer_gpus(config: RunConfig, hardware: Hardware) -> tuple[int, ...]:
    ranks = config.trainer.ranks if isinstance(config, TrainConfig) else 1
    kind, _, number = config.device.partition(":")
    count = len(hardware.gpus)
    if kind == "cuda" and int(number or 0) >= count:
        do = f"give a number below {count}: {count} GPUs are visible" if count else "use cpu or auto: torch sees no GPU"
        raise InvalidInput("device", got=config.device, do=f"{do} on this machine")
    if ranks > 1 and number:
        raise InvalidInput("device", got=config.device, do=f"give cuda: the {ranks} ranks use the first {ranks} GPUs")
    uses_gpus = kind == "cuda" or (kind == "auto" and count > 0)
    available, what = (count, "GPUs") if uses_gpus else (hardware.cores, "CPU cores")
    if ranks > 1 and ranks > available:
        do = f"give at most {available}: this machine has {available} {what}, and each rank needs one"
        raise InvalidInput("trainer.ranks", got=ranks, do=do)
    if not uses_gpus:
        return ()
    return (int(number),) if number else tuple(range(ranks))


def _parse(devices: Sequence[str]) -> Iterator[tuple[int, ...]]:
    for entry in devices:
        numbers = entry.split("+")
        if not all(number.strip().isdecimal() for number in numbers):
            do = "give numbers of GPUs from 0, one entry per server: 1,2 or, with two GPUs per server, 1+2,3+4"
            raise InvalidInput("engine.vllm.devices", got=entry, do=do)
        yield tuple(int(number) for number in numbers)


def _check_servers(
    config: RunConfig, servers: Sequence[tuple[int, ...]], trainer: Sequence[int], size: int, count: int
) -> None:
    # Raise InvalidInput if the vLLM servers and the trainer cannot use their GPUs at the same time. ``size`` is the
    # number of GPUs that a server needs.
    used = [gpu for gpus in servers for gpu in gpus]
    repeated = next((gpu for gpu in used if used.count(gpu) > 1), None)
    wrong = next((gpus for gpus in servers if len(gpus) != size), None)
    do = ""
    if repeated is not None:
        do = f"give each GPU to one server: GPU {repeated} is there twice"
    elif set(used) & set(trainer) and not re.search(MEMORY_SHARE, config.engine.vllm.arguments):
        both = min(set(used) & set(trainer))
        do = f"leave out GPU {both}, which the trainer takes, or share it: engine.vllm.arguments "
        do += "'--gpu-memory-utilization 0.4'"
    elif count and max(used) >= count:
        do = f"give numbers below {count}: {count} GPUs are visible, and CUDA_VISIBLE_DEVICES renumbers them from 0"
    elif wrong is not None:
        do = f"give {size} per server, the product of the parallel sizes in engine.vllm.arguments, not {len(wrong)}"
    if do:
        raise InvalidInput("engine.vllm.devices", got=",".join(config.engine.vllm.devices), do=do)


def _join(gpus: Sequence[int]) -> str:
    return "+".join(map(str, gpus))


log = logging.getLogger(__name__)

SERVED_NAME = "policy"

POLL_SECONDS = 0.2

LOGS = "logs"

FIND_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


class ServerRefused(InvalidInput):
    """Raised if a vLLM server did not start, cannot be reached, or serves wrong weights."""


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A vLLM server that was started, and the address of the server. The server may not be ready for requests yet."""

    url: str
    process: Server


class ServerLauncher(Protocol):
    """An object that starts the vLLM servers of a run."""

    def start(self, number: int, model: Path, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        """Start a server of the folder ``model``. Return without waiting until the server is ready for requests."""
        ...


class LocalServers:
    """A :class:`ServerLauncher` that starts child processes. The settings determine the GPUs of each process."""

    def __init__(self, config: RunConfig) -> None:
        self._hardware = find_hardware()
        self._plan, self._vllm = plan_devices(config, self._hardware), config.engine.vllm

    def start(self, number: int, model: Path, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        if number == 0:
            _require_vllm(self._vllm)
        port = free_port()
        environment = server_environment(server_gpus(self._plan, number, self._hardware))
        return StartedServer(f"http://{LOOPBACK}:{port}", ServerProcess(command(LOOPBACK, port), environment, log))


class VllmServers:
    """A factory of engines on vLLM servers, which the first engine starts, and which end with the last engine.

    The output of a server that ended by itself is copied to ``run_folder``. By default, servers are child processes.
    """

    def __init__(self, run_folder: Path | None = None, launcher: ServerLauncher | None = None) -> None:
        self._shared: SharedPool | None = None
        self._run_folder, self._launcher = run_folder, launcher

    def engine(self, policy: Policy, config: RunConfig) -> InferenceEngine:
        """Return an engine for ``policy``. Make the first call outside an event loop: it uses ``asyncio.run``."""
        folder, dtype = config.engine.vllm.weights_folder, config.engine.dtype
        parent = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
        folders = WeightFolders(parent, dtype, tied=False, shared_memory=folder is None)
        if self._shared is None:
            try:
                launcher = self._launcher or LocalServers(config)
                self._shared = _start(policy, config, folders, self._run_folder, launcher)
            except BaseException:
                folders.close()
                raise
        return PolicyEngine(self._shared, policy.model, folders)


def _start(
    policy: Policy, config: RunConfig, folders: WeightFolders, run_folder: Path | None, launcher: ServerLauncher
) -> SharedPool:
    engine, vllm = config.engine, config.engine.vllm
    adapters = _adapter_options(policy, vllm)
    try:
        weights = write_weights(folders, policy.model, PolicyVersion(0, step=0), adapters=bool(adapters))
    except EngineError as error:
        raise InvalidInput("model", got=config.model, do=f"make room for its weights ({error})") from error
    logs = TemporaryFolder("agent-r1-vllm-")
    context = max(policy.context_length, PROMPT_LENGTH + 1)
    started: list[Server] = []

    def stop() -> None:
        crashed = [(server, server.last_words()) for server in started if not server.is_running]
        for server in started:
            server.stop()
        for server, words in crashed:
            log.warning("a vLLM server ended: %s; its output is in %s", words, _keep(server, run_folder))
        if run_folder is not None or not crashed:
            logs.remove()
        else:
            logs.keep()

    try:
        urls = list(vllm.urls)
        if not urls:
            model = weights.handle.base if isinstance(weights.handle, AdapterFolders) else weights.handle
            assert isinstance(model, Path)
            policy.tokenizer.save_pretrained(model)  # the servers search for stop strings in the text
            command = partial(_command, engine, model, context, adapters)
            for number in range(engine.replicas):
                new = launcher.start(number, model, command, logs.path / f"server-{number}.log")
                started.append(new.process)
                urls.append(new.url)
            _wait(started, urls, vllm.start_seconds)
        names = [_check(url, context) for url in urls]
        checked = [_reports_checksums(url) for url in urls]
        if not all(checked):
            do = f"start each server with PYTHONPATH={WORKER_FOLDER} and {' '.join(CHECKSUM_OPTIONS)}"
            log.warning("a vLLM server reports no checksum of the weights that it loads; to get one, %s", do)

        def replicas() -> list[VllmEngine]:
            settings = policy.context_length, engine.dtype, vllm.start_seconds
            deliver: list[Callable[[Path], None] | None] = [server.deliver for server in started]
            return [
                VllmEngine(url, name, *settings, adapters=bool(adapters), reports_checksums=reports, deliver=copy)
                for url, name, reports, copy in zip(urls, names, checked, deliver or [None] * len(urls), strict=True)
            ]

        limits = PoolLimits(engine.max_sequences, vllm.start_seconds, vllm.stall_seconds)
        asyncio.run(send_first_weights(EnginePool(replicas(), limits), weights, logs.path if started else None))
    except BaseException as error:
        for server in started:
            server.stop()
        if isinstance(error, InvalidInput) and started:
            logs.keep()  # the message names the output of the server
        else:
            logs.remove()
        raise
    return SharedPool(EnginePool(replicas(), limits), stop, started)


def _keep(server: Server, run_folder: Path | None) -> Path:
    if run_folder is None or not server.log.is_file():
        return server.log
    kept = run_folder / LOGS / server.log.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(server.log, kept))


def _require_vllm(vllm: VllmConfig) -> None:
    do = "give the Python of an environment in which 'pip install vllm' was run, such as /opt/vllm/bin/python"
    try:
        found = subprocess.run([vllm.python, "-c", FIND_VLLM], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInput("engine.vllm.python", got=vllm.python, do=f"{do} ({error})") from error
    if found.returncode != 0:
        raise InvalidInput("engine.vllm.python", got=f"{vllm.python}, which has no vllm", do=do)


def _command(
    engine: EngineConfig, folder: Path, context: int, adapters: Sequence[str], host: str, port: int
) -> list[str]:
    # The command runs a module of vLLM, because ``vllm serve`` does not work with every wheel of vLLM.
    command = [engine.vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", SERVED_NAME, "--host", host, "--port", str(port)]
    # one sequence more than the pool sends, so that a probe does not wait for a place
    command += ["--dtype", engine.dtype, "--max-model-len", str(context)]
    command += ["--max-num-seqs", str(engine.max_sequences + 1)]
    if engine.kv_cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * 2**30))]
    return [*command, *SERVER_OPTIONS, *CHECKSUM_OPTIONS, *adapters, *shlex.split(engine.vllm.arguments)]


def server_environment(gpus: str | None) -> dict[str, str]:
    """Return the additional environment variables of a server."""
    path = os.pathsep.join(filter(None, (str(WORKER_FOLDER), os.environ.get("PYTHONPATH"))))
    return {**SERVER_ENVIRONMENT, "PYTHONPATH": path, **({} if gpus is None else {VISIBLE: gpus})}


def _wait(servers: Sequence[Server], urls: Sequence[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    starting = list(zip(servers, urls, strict=True))
    while starting := [(server, url) for server, url in starting if not _is_healthy(url)]:
        for server, _ in starting:
            if not server.is_running:
                got = f"a server that ended: {server.last_words()}"
                raise ServerRefused("vLLM", got=got, do=f"read {server.log}, and change engine.vllm.arguments")
        if time.monotonic() > deadline:
            server, _ = starting[0]
            got = f"a server that did not start within {seconds:g} s: {server.last_words()}"
            raise ServerRefused("vLLM", got=got, do=f"read {server.log}, or raise engine.vllm.start_seconds")
        time.sleep(POLL_SECONDS)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=CONNECT_SECONDS, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _adapter_options(policy: Policy, vllm: VllmConfig) -> tuple[str, ...]:
    # Return the options that a vLLM server needs for the adapter of ``policy``; () if the servers get whole weights.
    options = adapter_options(adapter_rank(policy.model), vllm.arguments)
    if not options or all(map(_accepts_adapters, vllm.urls)):
        return options
    variables = " ".join(f"{name}={value}" for name, value in SERVER_ENVIRONMENT.items())
    got = "a vLLM server accepts no adapters, so whole weights are sent, with the adapter merged"
    log.warning("%s; to send only the adapter, start each server with %s %s", got, variables, " ".join(options))
    return ()


def _accepts_adapters(url: str) -> bool:
    try:
        return httpx.post(f"{url}{LOAD_ADAPTER}", json={}, timeout=CONNECT_SECONDS, trust_env=False).status_code != 404
    except httpx.HTTPError:
        return True  # the check that follows reports a server that does not answer


def _reports_checksums(url: str) -> bool:
    body = {"method": "reports_checksums"}
    try:
        return httpx.post(f"{url}{COLLECTIVE_RPC}", json=body, timeout=CONNECT_SECONDS, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _check(url: str, context: int) -> str:
    # Raise ServerRefused if the server is no vLLM server, has no tokenizer, lacks one of the HTTP endpoints that a run
    # needs, or accepts fewer than ``context`` tokens.
    shown = redact_url(url)
    do = f"start vLLM 0.32 or newer there with VLLM_SERVER_DEV_MODE=1 and {' '.join(SERVER_OPTIONS)}"
    with httpx.Client(base_url=url, timeout=CONNECT_SECONDS, trust_env=False) as client:
        try:
            models = client.get("/v1/models")
            served = models.json()["data"][0]
            name, longest = str(served["id"]), int(served["max_model_len"])
            info, probe = client.get("/weight_info"), client.post("/inference/v1/generate", json={})
            text = client.post("/tokenize", json={"model": name, "prompt": "a"})
        except httpx.HTTPError as error:
            raise ServerRefused("vLLM server", got=shown, do=f"{do} ({type(error).__name__}: {error})") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            got = f"{shown}, which answers {models.status_code} but is no vLLM server"
            raise ServerRefused("vLLM server", got=got, do=do) from error
    for path, answer in (("/weight_info", info), ("/inference/v1/generate", probe)):
        if answer.status_code == 404:
            raise ServerRefused("vLLM server", got=f"{shown}, without {path}", do=do)
    if not text.is_success:
        got = f"{shown}, which has no tokenizer ({error_message(text)})"
        raise ServerRefused(
            "vLLM server", got=got, do="start it without --skip-tokenizer-init: it searches for stop strings"
        )
    if longest < context:
        got = f"{shown}, with a context of {longest} tokens"
        raise ServerRefused("vLLM server", got=got, do=f"start it with --max-model-len {context}, or lower --context")
    return name


async def send_first_weights(pool: EnginePool, weights: WeightUpdate, logs: Path | None) -> None:
    """Send ``weights`` to all servers, and close ``pool``. Raise ServerRefused if a server does not serve them then."""
    try:
        reasons = ""
        try:
            await pool.update_weights(weights)
            reasons = pool.reasons()
        except EngineError as error:
            reasons = str(error)
        if pool.num_serving < len(pool.replicas):
            do = (
                "start it with this model, its vocabulary and its data type, untied, and with the folder of the weights"
            )
            do += f" in reach: {weights.handle}" if logs is None else f" in reach; its output is in {logs}"
            raise ServerRefused("inference server", got=reasons, do=do)
    finally:
        await pool.close()
