"""Agents of users: loading, and the choice between an agent of a user and the agent loop."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import AgentFunction
from agent_r1.core.taskset import TaskSet
from agent_r1.gateway import AgentHost, AgentProgram, AgentProgramEnv
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.rollout.session import Rollout
from agent_r1.training.config import RunConfig
from agent_r1.training.user_task import check_agent, import_file

AGENT_MODULE = "agent_program"
"""The module name under which the file of an agent is imported."""


def with_agent(taskset: TaskSet, config: RunConfig) -> TaskSet:
    """Return the task set in which the agent of ``config.agent`` or of the task set acts.

    Without such an agent, the task set is unchanged. The baselines of the task set keep their own environments.

    Raises InvalidInput if the agent cannot be loaded, or if there is no agent and ``config.gateway`` is set.
    """
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
    """Return the function ``FILE.py:NAME``.

    Raises InvalidInput if the file does not exist or raises an error, or if it does not define the function.
    """
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


def make_rollout(agent: Agent, env: Env) -> Rollout:
    """Return the rollout in which ``agent`` is the policy in ``env``."""
    if isinstance(env, AgentProgramEnv):
        return AgentProgram(env.function, agent, env.host)
    return AgentLoop(agent, env)


async def close_agents(taskset: TaskSet) -> None:
    """Stop the gateway of the task set's agent, if it has one."""
    if isinstance(taskset.env, AgentProgramEnv):
        await taskset.env.host.close()
