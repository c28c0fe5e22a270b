"""Environments on workers: describe the environments of a task set, serve them, and connect to them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.tasks import run_protected
from agent_r1.core.taskset import TaskSet
from agent_r1.store.manifest import hash_file
from agent_r1.training.agent_programs import close_agents, with_agent
from agent_r1.training.config import GuidedConfig, TasksetConfig
from agent_r1.training.data_fingerprint import data_hashes
from agent_r1.training.worker_config import WorkerConfig
from agent_r1.workers import (
    EnvironmentWorker,
    RemoteEnv,
    WorkerDescription,
    WorkerLimits,
    WorkerPool,
    check_workers,
)

ENV, VARIANT, BASELINE = "env", "variant ", "baseline "
"""The parts of an environment's name on a worker.

The name is ``env`` for the task set's environment, ``variant SPLIT`` for the environment of one split, and
``baseline METHOD`` for the environment of a baseline.
"""


def with_environments(taskset: TaskSet, config: GuidedConfig) -> TaskSet:
    """Return ``taskset`` with the environments that ``config`` requires.

    - With workers (``config.environment.workers``), the environments run on the workers.
    - Without workers, but with an agent program, the agent program acts in the environments (:func:`with_agent`).
    - Without workers and without an agent program, the task set is unchanged.

    Raises:
        InvalidInput: a worker cannot be reached; the description of a worker differs from the description of the run
            (:func:`describe_environments`); workers are combined with an agent program; or :func:`with_agent` raises
            InvalidInput.
    """
    settings = config.environment
    if not settings.workers:
        return with_agent(taskset, config)
    if config.agent or taskset.agent is not None:
        do = "leave it out: an agent of your own runs its tools itself"
        raise InvalidInput("environment.workers", got=", ".join(settings.workers), do=do)
    description = describe_environments(config, taskset)
    check_workers(settings, description)
    pool = WorkerPool(settings, description)
    remote = {name: RemoteEnv(env, name, pool) for name, env in environments_of(taskset).items()}
    return replace(
        taskset,
        env=remote[ENV],
        variants={split: remote[f"{VARIANT}{split}"] for split in taskset.variants},
        baselines={method: remote[f"{BASELINE}{method}"] for method in taskset.baselines},
    )


async def close_environments(taskset: TaskSet) -> None:
    """Stop the gateway of an agent program, or close the connections to workers."""
    await close_agents(taskset)
    if isinstance(taskset.env, RemoteEnv):
        await taskset.env.pool.close()


def environments_of(taskset: TaskSet) -> dict[str, Env]:
    """Return all environments of a task set. The keys are the environments' names on a worker (see ``ENV``)."""
    variants = {f"{VARIANT}{split}": env for split, env in taskset.variants.items()}
    return {ENV: taskset.env, **variants, **{f"{BASELINE}{name}": env for name, env in taskset.baselines.items()}}


def describe_environments(config: TasksetConfig, taskset: TaskSet) -> WorkerDescription:
    """Return the task set's name, the version of agent-r1, and hashes of the tasks, the tools and the user's files.

    A run accepts a worker only if the worker's description agrees with the run's description.
    """
    hashes = dict(data_hashes(config, taskset))
    tools = {name: [tool.to_openai() for tool in env.tools] for name, env in environments_of(taskset).items()}
    hashes["tools"] = hashlib.sha256(json.dumps(tools, sort_keys=True, default=repr).encode()).hexdigest()
    if taskset.file is not None:
        hashes["file"] = hash_file(Path(taskset.file))
    return WorkerDescription(version=version("agent-r1"), taskset=taskset.name, fingerprints=hashes)


def serve_environments(
    config: WorkerConfig, taskset: TaskSet, token: str, on_started: Callable[[str, WorkerDescription], None]
) -> None:
    """Serve the environments of a task set to runs on other machines, until SIGINT or SIGTERM arrives.

    Args:
        token: the token that requests must have; "" for none.
        on_started: called with the worker's address and description when the worker listens.

    Raises InvalidInput if the address cannot be used; if ``token`` is "" and the address is not a loopback address; if
    ``token`` is too short; or if the task set has an agent of its own.
    """
    if taskset.agent is not None:
        do = "give a task set without an agent of its own, which runs its tools itself"
        raise InvalidInput("task set", got=taskset.name, do=do)
    description = describe_environments(config, taskset)
    limits = WorkerLimits(config.max_episodes, config.idle_seconds)
    worker = EnvironmentWorker(
        environments_of(taskset), taskset.tasks, description, limits, token=token, host=config.host, port=config.port
    )
    run_protected(_serve(worker, lambda: on_started(worker.url, description)))


async def _serve(worker: EnvironmentWorker, on_started: Callable[[], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    worker.start()
    try:
        on_started()
        await stopped.wait()
    finally:
        await worker.close()
