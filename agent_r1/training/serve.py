"""Serve a model over HTTP in the request formats of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import torch

from agent_r1.core.tasks import run_protected
from agent_r1.gateway import Gateway, ServedModel
from agent_r1.rollout.agent_loop import Agent
from agent_r1.store import is_run, run_folder
from agent_r1.training.build import resolve_placement
from agent_r1.training.checkpoint.files import find_trained_model
from agent_r1.training.config import EvalConfig
from agent_r1.training.policy import load_policy


def serve(config: EvalConfig, port: int, key: str | None, on_started: Callable[[str, str], None]) -> None:
    """Serve ``config.model`` over HTTP, until SIGINT or SIGTERM arrives.

    ``config.model`` names a model, or a training run whose trained model is served.

    Args:
        port: the port on this machine; 0: any free port.
        key: the API key; None: a new random key.
        on_started: called with the base URL and the API key when the server is ready.

    Raises InvalidInput if the model cannot be loaded or the port is in use.
    """
    torch.set_num_threads(config.threads)
    folder = run_folder(config.model)
    name = str(find_trained_model(folder)) if is_run(folder) else config.model
    policy = load_policy(config.model_copy(update={"model": name}), None, config.engine.dtype)
    agent = policy.agent(resolve_placement(None, config).engine(policy, config), config, 1.0)
    run_protected(_serve(agent, config.model, port, key, on_started))


async def _serve(agent: Agent, name: str, port: int, key: str | None, on_started: Callable[[str, str], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    gateway = Gateway(port)
    try:
        await gateway.start()
        on_started(gateway.base_url, gateway.register(ServedModel(agent, name), key))
        await stopped.wait()
    finally:
        await gateway.close()
        await agent.engine.close()
