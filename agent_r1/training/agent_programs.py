"""Agent programs. An agent program is a user's function that acts as the agent and calls the model over HTTP."""

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


def with_agent(taskset: TaskSet, config: RunConfig) -> TaskSet:
    """Return ``taskset`` with environments in which the agent program ``config.agent`` acts.

    If ``config.agent`` is empty, the agent program is ``taskset.agent``. Without an agent program, ``taskset`` is
    returned unchanged. The environments of baselines do not change.

    Raises:
        InvalidInput: the agent program cannot be loaded; an agent program is combined with a context policy; or
            ``config.gateway`` is set without an agent program.
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
    """Return the function of an agent program, given as FILE:NAME, such as "my_agent.py:run".

    Raises InvalidInput if the file does not exist, raises an error or does not define the function.
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
    """Return the rollout in which ``agent`` acts in ``env``.

    If ``env`` belongs to an agent program, the program acts, and ``agent`` answers the program's model requests.
    """
    if isinstance(env, AgentProgramEnv):
        return AgentProgram(env.function, agent, env.host)
    return AgentLoop(agent, env)


async def close_agents(taskset: TaskSet) -> None:
    """Stop the gateway of the task set's agent program, if there is one."""
    if isinstance(taskset.env, AgentProgramEnv):
        await taskset.env.host.close()
