"""The SGLang servers of a run."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import InferenceEngine, PolicyVersion
from agent_r1.core.redaction import redact_url
from agent_r1.inference.canary import PROMPT_LENGTH
from agent_r1.inference.policy_engine import PolicyEngine, SharedPool, WeightFolders, write_weights
from agent_r1.inference.pool import EnginePool, PoolLimits
from agent_r1.inference.server_process import CONNECT_SECONDS
from agent_r1.inference.sglang import SglangEngine
from agent_r1.training.config import RunConfig
from agent_r1.training.policy import Policy
from agent_r1.training.servers import ServerRefused, send_first_weights

ENDPOINTS = ("/update_weights_from_disk", "/continue_generation")
"""Endpoints that old versions of SGLang lack. A request without content shows whether an endpoint exists. Such a
request changes nothing."""


class SglangServers:
    """A factory of engines that generate on the SGLang servers at ``engine.sglang.urls``. All engines share the
    servers."""

    def __init__(self) -> None:
        self._shared: SharedPool | None = None

    def engine(self, policy: Policy, config: RunConfig) -> InferenceEngine:
        """Return an engine that serves ``policy``.

        The first call of this method uses ``asyncio.run``, so make the first call outside an event loop.

        Raise InvalidInput if a server cannot be reached, does not fit the settings, or serves wrong weights.
        """
        folder = config.engine.sglang.weights_folder
        parent = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
        folders = WeightFolders(parent, config.engine.dtype, tied=False, shared_memory=folder is None)
        if self._shared is None:
            try:
                self._shared = _connect(policy, config, folders)
            except BaseException:
                folders.close()
                raise
        return PolicyEngine(self._shared, policy.model, folders)


def _connect(policy: Policy, config: RunConfig, folders: WeightFolders) -> SharedPool:
    settings, dtype = config.engine.sglang, config.engine.dtype
    try:
        weights = write_weights(folders, policy.model, PolicyVersion(0, step=0), adapters=False)
    except EngineError as error:
        raise InvalidInput("model", got=config.model, do=f"make room for its weights ({error})") from error
    for url in settings.urls:
        _check(url, max(policy.context_length, PROMPT_LENGTH + 1))
    limits = PoolLimits(config.engine.max_sequences, settings.update_seconds, settings.stall_seconds)

    def pool() -> EnginePool:
        seconds = settings.update_seconds
        return EnginePool([SglangEngine(url, policy.context_length, dtype, seconds) for url in settings.urls], limits)

    asyncio.run(send_first_weights(pool(), weights, logs=None))
    return SharedPool(pool(), stop=lambda: None)


def _check(url: str, context: int) -> None:
    shown = redact_url(url)
    do = "start SGLang 0.5 or newer there, as docs/scaling.md describes"
    with httpx.Client(base_url=url, timeout=CONNECT_SECONDS, trust_env=False) as client:
        try:
            info = _server_info(client)
            longest = int(client.get("/v1/models").json()["data"][0]["max_model_len"])
            missing = [path for path in ENDPOINTS if client.post(path).status_code == 404]
        except httpx.HTTPError as error:
            raise ServerRefused("SGLang server", got=shown, do=f"{do} ({type(error).__name__}: {error})") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerRefused("SGLang server", got=f"{shown}, which is no SGLang server", do=do) from error
    if missing:
        raise ServerRefused("SGLang server", got=f"{shown}, version {info['version']}, without {missing[0]}", do=do)
    if info.get("skip_tokenizer_init"):
        do = "start it without --skip-tokenizer-init: it searches for stop strings"
        raise ServerRefused("SGLang server", got=f"{shown}, which has no tokenizer", do=do)
    if longest < context:
        got = f"{shown}, with a context of {longest} tokens"
        raise ServerRefused(
            "SGLang server", got=got, do=f"start it with --context-length {context}, or lower --context"
        )


def _server_info(client: httpx.Client) -> dict[str, Any]:
    response = client.get("/server_info")
    if response.status_code == 404:  # the name in older versions
        response = client.get("/get_server_info")
    info: dict[str, Any] = response.json()
    return {**info, "version": str(info["version"])}
