"""Environments on OpenEnv servers (https://github.com/huggingface/OpenEnv), with one session per episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error, import_extra
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.envs.games import Observation, add_observation, seeded_tasks, to_transition

CLOSE_SECONDS = 2.0
RETRY_SECONDS = 0.1  # between two attempts to get a session

_FULL = "CAPACITY_REACHED"  # the server's error code if all its sessions are in use
_INVALID = "VALIDATION_ERROR"  # the server's error code for an invalid action


def as_text(observation: Mapping[str, Any]) -> str:
    """Return an observation as JSON. If it has, except metadata, a single field with text, return this text."""
    values = [value for name, value in observation.items() if name != "metadata"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


class OpenEnv:
    """The environment of an OpenEnv server.

    The server's environment is reset with the seed ``task.data["seed"]``, or with the seed of the attempt if the task
    has no seed. ``data["reset"]`` can hold further arguments of the reset.

    If the server rejects an action, or the function ``action`` raises ValueError, the policy gets an explanation, and
    the turn counts towards ``max_turns``. If the server fails or times out, the episode fails.

    Args:
        url: the address of the server, e.g. ``http://127.0.0.1:8000``.
        action: converts the text of the policy to the server's action, as JSON.
        show: converts an observation to the text that the policy sees.
        sessions: the largest number of concurrent episodes, at most the limit of the server (``max_concurrent_envs``, 1
            by default). Further episodes wait.
        timeout: the time limit of a server response in seconds.
    """

    tools: tuple[ToolSpec, ...] = ()

    def __init__(
        self,
        url: str,
        action: Callable[[str], Mapping[str, Any]],
        *,
        show: Callable[[Mapping[str, Any]], str] = as_text,
        sessions: int = 1,
        max_turns: int = 50,
        timeout: float = 20.0,
    ) -> None:
        self._client = import_extra("openenv.core.generic_client", extra="openenv").GenericEnvClient
        self.url, self.action, self.show = url, action, show
        self.sessions, self.max_turns, self.timeout = sessions, max_turns, timeout
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def tasks(self, train: int, test: int = 0, seed: int = 0, instruction: str = "") -> list[Task]:
        """Return tasks with a seed each. ``instruction``, if given, is the first message of each episode."""
        return seeded_tasks("openenv", (Message.user(instruction),) if instruction else (), train, test, seed)

    async def open(self, task: Task, context: RolloutContext) -> OpenEnvEpisode:
        arguments = {"seed": task.data.get("seed", context.seed % 2**31)} | dict(task.data.get("reset", {}))
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sessions))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(slots)
            client, result = await self._reset(stack, arguments)
            start = add_observation(task, self.show(result.observation))
            return OpenEnvEpisode(self, client, start, stack.pop_all())

    async def _reset(self, stack: AsyncExitStack, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        # If the server has no free session, try again until the time limit. Closing ``stack`` closes the client.
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.timeout
        while True:
            async with AsyncExitStack() as connection:
                client = await connection.enter_async_context(self._connect())
                try:
                    result = await self.wait_for(client.reset(**arguments))
                    await stack.enter_async_context(connection.pop_all())
                    return client, result
                except Exception as error:
                    # A full server can also close the connection. A session ends some time after its client has closed.
                    closed = import_extra("websockets.exceptions", extra="openenv").ConnectionClosedOK
                    if _FULL not in str(error) and not isinstance(error, closed):
                        raise
                    if clock() > deadline:
                        raise AgentR1Error(f"{self.url} had no session free for {self.timeout:g} seconds") from error
            await asyncio.sleep(RETRY_SECONDS)

    async def wait_for(self, response: Awaitable[Any]) -> Any:
        """Return a response of the server. Raise AgentR1Error if the time limit is exceeded."""
        try:
            return await response
        except TimeoutError as error:
            raise AgentR1Error(f"{self.url} did not answer within {self.timeout:g} seconds") from error

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        client = self._client(self.url, connect_timeout_s=self.timeout, message_timeout_s=self.timeout)
        try:
            yield await client.connect()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await client.close()


@dataclass(slots=True)
class OpenEnvEpisode:
    env: OpenEnv
    client: Any
    start: tuple[Message, ...]
    session: AsyncExitStack
    num_actions: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.num_actions += 1
        observation = await self._send(action.message.text)
        if observation.end is None and self.num_actions >= self.env.max_turns:
            observation = replace(observation, end="truncated")
        return to_transition(observation)

    async def close(self) -> None:
        await self.session.aclose()

    async def _send(self, text: str) -> Observation:
        try:
            action = dict(self.env.action(text))
        except ValueError as error:
            return Observation(f"That is no action: {error}", valid=False)
        try:
            result = await self.env.wait_for(self.client.step(action))
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise
            return Observation(f"The environment refused the action {json.dumps(action)}: {error}", valid=False)
        text = self.env.show(result.observation)
        return Observation(text, float(result.reward or 0.0), "terminal" if result.done else None)
