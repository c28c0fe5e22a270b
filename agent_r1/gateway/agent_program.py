"""The rollout of an agent program: a user's function that calls the policy through the gateway."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agent_r1.core.environment import Env, Episode, RolloutContext
from agent_r1.core.messages import ToolSpec
from agent_r1.core.profile import measure
from agent_r1.core.task import AgentFunction, Task
from agent_r1.core.threads import DaemonThreads, run_in_thread
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.gateway.config import GatewayConfig
from agent_r1.gateway.episode import EpisodeModel
from agent_r1.gateway.server import Gateway
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.session import Session
from agent_r1.rollout.user_code import isolate

log = logging.getLogger(__name__)

RESPONSE_SECONDS = 10.0
"""How long the agents' event loop may take to react after a cancellation, in seconds.

A loop that takes longer is blocked by an agent. Later calls then use a new event loop.
"""


class AgentThreads:
    """The threads of agent programs: one per sync program, and one event loop for all async programs.

    Programs do not run in the event loop of the run, because an async program can block its event loop.
    """

    def __init__(self) -> None:
        self._pool = DaemonThreads("agent")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checking: asyncio.Task[None] | None = None  # an event loop keeps only weak references to its tasks

    async def call(self, function: AgentFunction, base_url: str, key: str, task: Task) -> object:
        """Call an agent program, and return its result. Exceptions of the program are raised in the caller.

        If the caller is cancelled, an async program is cancelled too.
        """
        given: Any
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            given = function(base_url, key, task)
        else:
            given = await run_in_thread(function, base_url, key, task, pool=self._pool)
            if not inspect.isawaitable(given):
                return given
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="agents", daemon=True).start()
        loop = self._loop
        result = asyncio.run_coroutine_threadsafe(_await(given), loop)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            self._checking = asyncio.create_task(self._replace_if_blocked(loop))
            raise

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:  # replaced already, or stopped by close
            return
        response: Future[None] = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(response), RESPONSE_SECONDS)
        except TimeoutError:
            if self._loop is loop:
                log.warning("an agent blocks the event loop of all agents; later episodes get a new event loop")
                self._loop = None

    def close(self) -> None:
        """Stop the event loop of the async programs. Programs that still run are abandoned."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def _await(given: Awaitable[object]) -> object:
    return await given


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except BaseException as error:  # a SystemExit in a task stops the loop; the other programs go on
            log.warning("a task of an agent raised %s", type(error).__name__)
    loop.close()


@dataclass(frozen=True, slots=True)
class AgentHost:
    """The gateway and the threads that all attempts of an agent program share."""

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
    OUT_OF_TOKENS or ENGINE_FAILED. Otherwise, if the function raised an exception, the status is OUT_OF_TOKENS after a
    cut answer, and else ``GatewayConfig.on_error`` determines it.
    """

    function: AgentFunction
    agent: Agent
    host: AgentHost

    async def run(self, task: Task, context: RolloutContext) -> tuple[Trajectory]:
        """Make one attempt. A failure of the program becomes the status of the trajectory."""
        session = self.agent.open_session(context.id)
        model = EpisodeModel(self.agent, session, self.host.config)
        try:
            async with asyncio.timeout_at(context.deadline), self._access(model) as key:
                end = await self._call(model, key, task)
        except TimeoutError:
            end = _End(Status.CANCELLED, "the agent ran past its deadline (episode_seconds)")
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

    async def _call(self, model: EpisodeModel, key: str, task: Task) -> _End:
        try:
            with isolate(_AgentError), measure("tools"):
                answer = await self.host.threads.call(self.function, self.host.gateway.base_url, key, task)
        except _AgentError as error:
            reason = f"the agent raised {error}"
            if self.host.config.on_error == "train":
                return _End(Status.COMPLETED, reason, answer="")
            # Many frameworks raise after a cut answer. To repeat such attempts would select short answers.
            return _End(Status.OUT_OF_TOKENS if model.has_cut_answer else Status.ENVIRONMENT_FAILED, reason)
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
