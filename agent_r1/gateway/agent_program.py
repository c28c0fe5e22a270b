"""The rollout of an agent program: a user's function that calls the policy through the gateway."""

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
    """The gateway and the threads that all attempts of an agent program share.

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
    """The environment of an agent program. The program runs its own tools.

    ``env`` is the environment of the task set. Episodes of ``env`` are opened only by the checks before a run. During
    the run, the program acts without an episode of ``env``.
    """

    env: Env
    function: AgentFunction
    host: AgentHost
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        return await self.env.open(task, context)


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A rollout in which an agent program acts: a user's function that calls the policy over HTTP.

    The episode ends when the function returns. The returned text or number is the answer of the trajectory. If the
    function returns None, the answer is the policy's last text.

    If the last request got no answer, the reason determines the status of the trajectory, such as OUT_OF_TURNS,
    OUT_OF_TOKENS or ENGINE_FAILED. Otherwise, if the function raised an exception, ``GatewayConfig.on_error``
    determines the status.
    """

    function: AgentFunction
    agent: Agent
    host: AgentHost

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        """Make one attempt at the task, and return a tuple with its trajectory.

        A failure of the program becomes the status of the trajectory. Only a cancellation raises an exception.
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
    status: Status
    reason: str | None = None
    answer: str | None = None


class _AgentError(Exception):
    """Raised if an agent program raises an exception. The message describes the program's exception in one line."""


def _with_failure(end: _End, model: EpisodeModel, session: Session) -> _End:
    """Return ``end`` with the status that follows from the requests of the program.

    The first case that applies determines the status. If no case applies, nothing changes.

    - The program was cancelled: nothing changes.
    - The last request failed: ``model.failure`` has the status.
    - The program completed without an answered request: the status is ENVIRONMENT_FAILED.
    - The program completed, and a limit of the run cut the last answer: the status is OUT_OF_TOKENS.
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
