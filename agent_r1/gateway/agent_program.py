"""The rollout of an agent program: a function of the user that calls the policy through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from agent_r1.core.environment import Env, Episode, RolloutContext
from agent_r1.core.profile import Part
from agent_r1.core.task import AgentFunction, Task
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.gateway.agent_threads import AgentThreads
from agent_r1.gateway.config import GatewayConfig
from agent_r1.gateway.episode import EpisodeModel
from agent_r1.gateway.server import Gateway
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.session import Session
from agent_r1.rollout.user_code import isolate


@dataclass(frozen=True, slots=True)
class AgentHost:
    """The services that all attempts of an agent program share: the gateway, and the threads in which the program runs.

    Example:
        host = AgentHost()
        (trajectory,) = await AgentProgram(run, policy, host).run(task, context)
        await host.close()
    """

    config: GatewayConfig = field(default_factory=GatewayConfig)
    gateway: Gateway = field(default_factory=Gateway)
    threads: AgentThreads = field(default_factory=AgentThreads)

    async def close(self) -> None:
        await self.gateway.close()
        self.threads.close()


@dataclass(slots=True)
class AgentProgramEnv:
    """The environment of an agent program, which runs its own tools.

    Attributes:
        env: the environment of the task set. Only the checks before a run open episodes of this environment.
        function: the agent program.
        host: the gateway and the threads of the agent program.
    """

    env: Env
    function: AgentFunction
    host: AgentHost
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        return await self.env.open(task, context)


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A rollout in which an agent program acts: a function, written by the user, that calls the policy over HTTP.

    The function runs its own tools. The episode ends when the function returns. A returned text or number is the answer
    of the trajectory. If the function returns None, the answer is the last text of the policy.

    If the gateway refused the last request of the function, the refusal determines the status: no turns left, no tokens
    left, or a failed engine. Otherwise, if the function raises an exception, the setting ``on_error`` determines the
    status.
    """

    function: AgentFunction
    agent: Agent
    host: AgentHost

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        """Make one attempt at the task, and return a tuple with its trajectory.

        If the agent program fails, the trajectory has the status of the failure, and no exception is raised. Only the
        cancellation of this call raises an exception.
        """
        session = self.agent.open_session(context.id)
        model = EpisodeModel(self.agent, session, self.host.config)
        try:
            async with asyncio.timeout_at(context.deadline), self._access(model) as key:
                end = await self._call(key, task)
        except TimeoutError:
            end = _End(Status.CANCELLED, "the agent ran past its deadline")
        finally:
            await session.close()
        end = _with_failure(end, model, session)
        trajectory = session.trajectory(task.id, end.status, reason=end.reason, start=model.start)
        return (replace(trajectory, answer=end.answer),)

    @asynccontextmanager
    async def _access(self, model: EpisodeModel) -> AsyncIterator[str]:
        """Register the model at the gateway, and yield its API key. The key is revoked when the ``with`` block ends."""
        gateway = self.host.gateway
        await gateway.start()
        key = gateway.register(model)
        try:
            yield key
        finally:
            gateway.revoke(key)

    async def _call(self, key: str, task: Task) -> _End:
        try:
            with isolate(_AgentError), self.agent.profiler.measure(Part.TOOLS):
                answer = await self.host.threads.call(self.function, self.host.gateway.base_url, key, task)
        except _AgentError as error:
            reason = f"the agent raised {error}"
            if self.host.config.on_error == "train":
                return _End(Status.COMPLETED, reason, answer="")
            return _End(Status.ENVIRONMENT_FAILED, reason)
        if answer is not None and not isinstance(answer, str | int | float):
            reason = f"the agent returned an object of type {type(answer).__name__}; return text, a number or None"
            return _End(Status.ENVIRONMENT_FAILED, reason)
        return _End(Status.COMPLETED, answer=None if answer is None else str(answer))


@dataclass(frozen=True, slots=True)
class _End:
    """The way in which an agent program ended: the status of the episode, its reason, and the program's answer."""

    status: Status
    reason: str | None = None
    answer: str | None = None


class _AgentError(Exception):
    """Raised if an agent program raised an exception. The message describes the program's exception in one line."""


def _with_failure(end: _End, model: EpisodeModel, session: Session) -> _End:
    """Return ``end``, with a different status if the agent program did not get the answers that it needed.

    If the last request got no answer, the reason (``model.failure``) determines the status. An episode that the agent
    program completed gets a different status in two cases: ENVIRONMENT_FAILED if the policy gave no answer at all, and
    OUT_OF_TOKENS if a limit of the run cut the last answer. In all other cases, and after a cancellation, ``end`` is
    returned unchanged.
    """
    if end.status is Status.CANCELLED:
        return end
    if model.failure is not None:
        return replace(end, status=model.failure.status, reason=model.failure.reason or end.reason)
    if end.status is not Status.COMPLETED:
        return end
    if not session.turns:
        return _End(Status.ENVIRONMENT_FAILED, end.reason or "the agent ended without an answer of the policy")
    if model.is_cut:
        return replace(end, status=Status.OUT_OF_TOKENS)
    return end
