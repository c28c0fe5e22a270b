"""Agent programs. An agent program is a user's function that acts as the agent and calls the model over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from agent_r1.core.environment import Env, named_envs
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import AgentFunction
from agent_r1.core.taskset import TaskSet
from agent_r1.gateway.agent_program import AgentHost, AgentProgram, AgentProgramEnv
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.api_agent import ApiAgent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.rollout.session import Rollout
from agent_r1.store.manifest import hash_file
from agent_r1.tasksets.transcripts import Transcripts
from agent_r1.training.config import RunConfig, TasksetConfig
from agent_r1.training.preflight import data_hashes
from agent_r1.training.user_task import check_agent, import_file
from agent_r1.workers.client import RemoteEnv, WorkerPool, check_workers
from agent_r1.workers.openenv import OpenEnvServer
from agent_r1.workers.protocol import WorkerDescription
from agent_r1.workers.server import EnvironmentWorker, WorkerLimits

AGENT_MODULE = "agent_program"


def with_agent(taskset: TaskSet, config: RunConfig) -> TaskSet:
    """Return ``taskset`` with environments in which its agent program or ``config.agent`` acts, if there is one."""
    function = load_agent(config.agent) if config.agent else taskset.agent
    if function is None:
        if "gateway" in config.model_fields_set and config.gateway != type(config.gateway)():
            raise InvalidInput("gateway", got=config.gateway, do="leave it out, or give --agent FILE.py:NAME")
        return taskset
    if not isinstance(build_context_policy(config.context_policy), Append):
        do = "leave it out: the agent writes its own conversations"
        raise InvalidInput("context_policy", got=f"{config.context_policy.name} with an agent", do=do)
    host = AgentHost(config.gateway)
    variants = {split: AgentProgramEnv(env, function, host) for split, env in taskset.variants.items()}
    return replace(taskset, env=AgentProgramEnv(taskset.env, function, host), variants=variants)


def load_agent(name: str) -> AgentFunction:
    """Return the function of an agent program, given as FILE:NAME, such as "my_agent.py:run"."""
    file, _, function_name = name.rpartition(":")
    if not file.endswith(".py") or not function_name:
        raise InvalidInput("agent", got=repr(name), do="give FILE.py:NAME of a function")
    if not os.path.isfile(file):  # also False if the text cannot be a path
        raise InvalidInput("agent", got=f"{file}, which is not a file", do="give FILE.py:NAME of a function")
    values = import_file(Path(file), AGENT_MODULE)
    if (function := check_agent(name, values.get(function_name))) is None:
        do = f"define {function_name}(base_url, api_key, task)"
        raise InvalidInput("agent", got=f"{file} without a function {function_name!r}", do=do)
    return function


def make_rollout(agent: Agent | ApiAgent, env: Env) -> Rollout:
    """Return the rollout in which ``agent`` acts in ``env``."""
    if isinstance(env, AgentProgramEnv):
        assert isinstance(agent, Agent), "api_methods refuses models behind an API"
        return AgentProgram(env.function, agent, env.host)
    if isinstance(env, Transcripts):
        from agent_r1.renderers.template_renderer import TemplateRenderer  # imports transformers
        from agent_r1.rollout.scripted import ScriptedAgent

        assert isinstance(agent, Agent) and isinstance(agent.renderer, TemplateRenderer)
        return ScriptedAgent(env, lambda attempt: env.responder(attempt.task), agent.renderer)
    return AgentLoop(agent, env)


def rollout_limits(config: RunConfig) -> RolloutLimits:
    """Return the limits of attempts from the settings."""
    return RolloutLimits(config.concurrency, config.episode_seconds, config.score_seconds, config.retries)


ENV, VARIANT, BASELINE = "env", "variant ", "baseline "
"""The parts of an environment's name on a worker: ``env``, ``variant SPLIT`` or ``baseline METHOD``."""


def with_environments(taskset: TaskSet, config: RunConfig) -> TaskSet:
    """Return ``taskset`` with environments on workers or for an agent program, if the run has any."""
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
    if isinstance(taskset.env, AgentProgramEnv):
        await taskset.env.host.close()
    if isinstance(taskset.env, RemoteEnv):
        await taskset.env.pool.close()


def environments_of(taskset: TaskSet) -> dict[str, Env]:
    """Return all environments of a task set. The keys are the environments' names on a worker (see ``ENV``)."""
    variants = {f"{VARIANT}{split}": env for split, env in taskset.variants.items()}
    return {ENV: taskset.env, **variants, **{f"{BASELINE}{name}": env for name, env in taskset.baselines.items()}}


def describe_environments(config: TasksetConfig, taskset: TaskSet) -> WorkerDescription:
    """Return what a worker must share with a run: task set, version, and hashes of tasks, tools and the user's file."""
    hashes = dict(data_hashes(config, taskset))
    tools = {
        f"{name} {own}".rstrip(): [tool.to_openai() for tool in one.tools]
        for name, env in environments_of(taskset).items()
        for own, one in named_envs(env).items()
    }
    hashes["tools"] = hashlib.sha256(json.dumps(tools, sort_keys=True, default=repr).encode()).hexdigest()
    if taskset.file is not None:
        hashes["file"] = hash_file(Path(taskset.file))
    return WorkerDescription(version=version("agent-r1"), taskset=Path(taskset.name).name, fingerprints=hashes)


def serve_environments(
    config: TasksetConfig,
    taskset: TaskSet,
    token: str,
    on_started: Callable[[str, WorkerDescription], None],
    *,
    host: str,
    port: int,
    limits: WorkerLimits,
) -> None:
    """Serve the environments of a task set to runs on other machines, until SIGINT or SIGTERM arrives."""
    _require_tools(taskset)
    description = describe_environments(config, taskset)
    environments = environments_of(taskset)
    worker = EnvironmentWorker(environments, taskset.tasks, description, limits, token=token, host=host, port=port)
    asyncio.run(_serve(worker, lambda: on_started(worker.url, description)))


def serve_openenv(
    taskset: TaskSet, token: str, on_started: Callable[[str], None], *, host: str, port: int, limits: WorkerLimits
) -> None:
    """Serve the environment of a task set by the protocol of OpenEnv, until SIGINT or SIGTERM arrives."""
    _require_tools(taskset)
    server = OpenEnvServer(taskset, limits, token=token, host=host, port=port)
    asyncio.run(_serve(server, lambda: on_started(server.url)))


def _require_tools(taskset: TaskSet) -> None:
    if taskset.agent is not None:
        do = "give a task set without an agent of its own, which runs its tools itself"
        raise InvalidInput("task set", got=taskset.name, do=do)


async def _serve(worker: EnvironmentWorker | OpenEnvServer, on_started: Callable[[], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    worker.start()
    try:
        on_started()
        await stopped.wait()
    finally:
        await worker.close()
