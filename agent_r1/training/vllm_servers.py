"""The vLLM servers of a run, and the engines that generate on these servers."""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.redaction import redact_url
from agent_r1.core.temporary_folders import TemporaryFolder
from agent_r1.core.weights import AdapterFolders, PolicyVersion, WeightUpdate
from agent_r1.inference.canary import PROMPT_LENGTH
from agent_r1.inference.config import EngineConfig, VllmConfig
from agent_r1.inference.policy_engine import PolicyEngine, SharedPool, write_weights
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.server_client import CONNECT_SECONDS, error_message
from agent_r1.inference.server_process import LOOPBACK, Server, ServerProcess, free_port
from agent_r1.inference.vllm import LOAD_ADAPTER, VllmEngine
from agent_r1.inference.vllm_options import SERVER_ENVIRONMENT, SERVER_OPTIONS, adapter_options
from agent_r1.inference.weight_folders import WeightFolders
from agent_r1.model.adapter import adapter_rank
from agent_r1.training.config import RunConfig
from agent_r1.training.devices import VISIBLE, find_hardware, plan_devices, server_gpus
from agent_r1.training.policy import Policy

log = logging.getLogger(__name__)

SERVED_NAME = "policy"

POLL_SECONDS = 0.2

LOGS = "logs"

FIND_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


class ServerRefused(InvalidInput):
    """Raised if a vLLM or SGLang server did not start, cannot be reached, or serves wrong weights."""


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A vLLM server that was started, and the address of the server. The server may not be ready for requests yet."""

    url: str
    process: Server


class ServerLauncher(Protocol):
    """An object that starts the vLLM servers of a run."""

    def start(self, number: int, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        """Start a server. Return without waiting until the server is ready for requests.

        Args:
            number: the index of the server, from 0.
            command: ``command(host, port)`` returns the command that starts a server at the address ``host:port``.
            log: the file for the server's output.
        """
        ...


class LocalServers:
    """A :class:`ServerLauncher` that starts child processes. The settings determine the GPUs of each process."""

    def __init__(self, config: RunConfig) -> None:
        self._hardware = find_hardware()
        self._plan, self._vllm = plan_devices(config, self._hardware), config.engine.vllm

    def start(self, number: int, command: Callable[[str, int], list[str]], log: Path) -> StartedServer:
        if number == 0:
            _require_vllm(self._vllm)
        port = free_port()
        environment = server_environment(server_gpus(self._plan, number, self._hardware))
        return StartedServer(f"http://{LOOPBACK}:{port}", ServerProcess(command(LOOPBACK, port), environment, log))


class VllmServers:
    """A factory of engines that generate on the vLLM servers of a run.

    The first engine starts the servers. The servers end when the last engine is closed.

    Args:
        run_folder: the folder to which a server's output is copied if the server ended by itself; None: no copy.
        launcher: starts the servers; None: as child processes.

    Example:
        servers = VllmServers()
        engine = servers.engine(policy, config)
    """

    def __init__(self, run_folder: Path | None = None, launcher: ServerLauncher | None = None) -> None:
        self._shared: SharedPool | None = None
        self._run_folder, self._launcher = run_folder, launcher

    def engine(self, policy: Policy, config: RunConfig) -> InferenceEngine:
        """Return an engine that serves ``policy``.

        The first call of this method uses ``asyncio.run``, so make the first call outside an event loop.

        Raise InvalidInput if the servers cannot be started or reached, do not fit the settings, or serve wrong weights.
        """
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
            urls = _start_servers(partial(_command, engine, model, context, adapters), engine, launcher, logs, started)
        names = [_check(url, context) for url in urls]

        def replicas() -> list[VllmEngine]:
            settings = policy.context_length, engine.dtype, vllm.update_seconds
            served = zip(urls, names, strict=True)
            return [VllmEngine(url, name, *settings, adapters=bool(adapters)) for url, name in served]

        limits = PoolLimits(engine.max_sequences, vllm.update_seconds, vllm.stall_seconds)
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


def _start_servers(
    command: Callable[[str, int], list[str]],
    engine: EngineConfig,
    launcher: ServerLauncher,
    logs: TemporaryFolder,
    started: list[Server],
) -> list[str]:
    """Start ``engine.replicas`` servers, wait until they are ready, and return their addresses.

    Each server is added to ``started`` when the server starts. If a later server fails, the caller can stop all servers
    in ``started``.
    """
    urls = []
    for number in range(engine.replicas):
        new = launcher.start(number, command, logs.path / f"server-{number}.log")
        started.append(new.process)
        urls.append(new.url)
    _wait(started, urls, engine.vllm.start_seconds)
    return urls


def _keep(server: Server, run_folder: Path | None) -> Path:
    """Copy the file with a server's output to the run's folder, and return the path of the copy.

    Without a run, or for a server on another machine, copy nothing, and return the path of the original file.
    """
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
    """Return the command that starts a vLLM server with the model in ``folder``.

    The command runs a module of vLLM, because ``vllm serve`` does not work with every wheel of vLLM.
    """
    command = [engine.vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", SERVED_NAME, "--host", host, "--port", str(port)]
    # one sequence more than the pool sends, so that a probe does not wait for a place
    command += ["--dtype", engine.dtype, "--max-model-len", str(context)]
    command += ["--max-num-seqs", str(engine.max_sequences + 1)]
    if engine.kv_cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * 2**30))]
    return [*command, *SERVER_OPTIONS, *adapters, *shlex.split(engine.vllm.arguments)]


def server_environment(gpus: str | None) -> dict[str, str]:
    """Return the additional environment variables of a server.

    ``gpus`` is a value of ``CUDA_VISIBLE_DEVICES``. None: the server sees all GPUs of this process.
    """
    return SERVER_ENVIRONMENT if gpus is None else {**SERVER_ENVIRONMENT, VISIBLE: gpus}


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
    """Return the options that a vLLM server needs for the adapter of ``policy``; () if the servers get whole weights.

    The servers get whole weights if ``policy`` has no adapter, if the rank of the adapter is too large, or if
    ``vllm.arguments`` turns adapters off. If a running server in ``vllm.urls`` accepts no adapters, log a warning and
    return ().
    """
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


def _check(url: str, context: int) -> str:
    """Return the name under which the server at ``url`` serves its model.

    Raise ServerRefused if the server is no vLLM server, has no tokenizer, lacks one of the HTTP endpoints that a run
    needs, or accepts fewer than ``context`` tokens.
    """
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
    """Send ``weights`` to all servers of ``pool``, and close ``pool``. The run itself needs another pool.

    Raise ServerRefused if a server does not serve ``weights`` afterwards. ``logs`` is the folder with the servers'
    output; None if the run uses servers that were started separately.
    """
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
