"""OpenEnv servers (https://github.com/meta-pytorch/OpenEnv): an environment behind a URL, a session per episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message
from agent_r1.core.packages import import_extra
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.envs.adapters.games import Observation, to_transition, with_observation

CLOSE_SECONDS = 2.0
"""What ending a session may take; a server that does not answer is left alone after it."""

RETRY_SECONDS = 0.1
"""Between two tries to get a session."""

_FULL = "CAPACITY_REACHED"  # how a server says that all its sessions are taken
_REFUSED = "VALIDATION_ERROR"  # how a server names an action that is none


def as_text(observation: Mapping[str, Any]) -> str:
    """The observation's text where it has one field and that is text; JSON otherwise.

    Example:
        >>> as_text({"echo": "hello"}), as_text({"x": 1, "y": 2})
        ('hello', '{"x": 1, "y": 2}')
    """
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


class OpenEnv:
    """The environment that an OpenEnv server serves.

    A task's ``data["seed"]`` is what the server's environment is reset with (an attempt's own where it has none), and
    so is everything in ``data["reset"]``, a mapping. An action that the server calls invalid, or that ``action``
    cannot make (it raises ValueError), is explained to the policy and costs a turn. A server that fails, ends or takes
    longer than ``timeout`` seconds fails the episode and no other.

    Args:
        url: of the server, e.g. ``http://127.0.0.1:8000``.
        action: makes the server's action, as its JSON, of what the policy said.
        show: makes what the policy is told of an observation.
        sessions: episodes at the same time, the others wait; no more than the server allows (its
            ``max_concurrent_envs``, by default one).
        max_turns: actions per episode, where the server allows more.
        timeout: seconds an answer of the server may take.

    Raises:
        InvalidInput: openenv-core is not installed, or a limit is not positive.
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
        for what, limit in (("sessions", sessions), ("max_turns", max_turns), ("timeout", timeout)):
            if not limit > 0:
                raise InvalidInput(what, got=limit, do="give a number > 0")
        self._client = import_extra("openenv.core.generic_client", extra="openenv-core").GenericEnvClient
        self.url, self.action, self.show = url, action, show
        self.sessions, self.max_turns, self.timeout = sessions, max_turns, timeout
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def tasks(self, train: int, test: int = 0, seed: int = 0, instruction: str = "") -> list[Task]:
        """Seeds to reset with, ``train`` of them in the split train and ``test`` others in the split test."""
        messages = (Message.user(instruction),) if instruction else ()
        first = seed * 1_000_003
        return [
            Task(f"openenv/{first + n}", messages, {"seed": first + n}, "train" if n < train else "test")
            for n in range(train + test)
        ]

    async def open(self, task: Task, context: RolloutContext) -> OpenEnvEpisode:
        """Raises AgentR1Error, or what the client raises, where the server gives no session."""
        given = {"seed": task.data.get("seed", context.seed % 2**31)} | dict(task.data.get("reset", {}))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._places_of_loop())
            client, result = await self._reset(stack, given)
            return OpenEnvEpisode(self, client, with_observation(task, self.show(result.observation)), stack.pop_all())

    async def _reset(self, stack: AsyncExitStack, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """A client and its first result; tried again while the server is full. ``stack`` closes the client."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.timeout
        while True:
            async with AsyncExitStack() as connection:
                client = await connection.enter_async_context(self._connection())
                try:
                    result = await self.answered(client.reset(**given))
                    await stack.enter_async_context(connection.pop_all())
                    return client, result
                except Exception as error:
                    if not self._full(error):
                        raise
                    if clock() > until:
                        raise AgentR1Error(f"{self.url} had no session free for {self.timeout:g} seconds") from error
            await asyncio.sleep(RETRY_SECONDS)

    async def answered(self, answer: Awaitable[Any]) -> Any:
        """The server's answer. Raises AgentR1Error where it does not come in time."""
        try:
            return await answer
        except TimeoutError as error:
            raise AgentR1Error(f"{self.url} did not answer within {self.timeout:g} seconds") from error

    def _places_of_loop(self) -> asyncio.Semaphore:
        return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sessions))

    def _full(self, error: Exception) -> bool:
        """Whether the server has no session free: it ends one some time after its client has left."""
        closed = import_extra("websockets.exceptions", extra="openenv-core").ConnectionClosedOK
        return _FULL in str(error) or isinstance(error, closed)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        client = self._client(self.url, connect_timeout_s=self.timeout, message_timeout_s=self.timeout)
        try:
            yield await client.connect()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await client.close()


@dataclass(slots=True)
class OpenEnvEpisode:
    """One attempt on a server. ``taken`` counts the actions so far."""

    env: OpenEnv
    client: Any
    start: tuple[Message, ...]
    session: AsyncExitStack
    taken: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.taken += 1
        seen = await self._seen(action.message.text)
        if seen.end is None and self.taken >= self.env.max_turns:
            seen = replace(seen, end="truncated")
        return to_transition(seen)

    async def close(self) -> None:
        await self.session.aclose()

    async def _seen(self, text: str) -> Observation:
        try:
            made = dict(self.env.action(text))
        except ValueError as error:
            return Observation(f"That is no action: {error}", valid=False)
        try:
            result = await self.env.answered(self.client.step(made))
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return Observation(f"The environment refused the action {json.dumps(made)}: {error}", valid=False)
        text = self.env.show(result.observation)
        return Observation(text, float(result.reward or 0.0), "terminal" if result.done else None)
