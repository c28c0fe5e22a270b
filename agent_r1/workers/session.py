"""An episode on a worker. While the worker answers a request of the run, the environment can query the run's models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from agent_r1.core.environment import Env, Episode, ModelClient, RolloutContext
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tasks import child_task
from agent_r1.rollout.session import close_quietly
from agent_r1.rollout.user_code import isolate, validate_messages, validate_transition
from agent_r1.store.codec import decode_messages, encode_messages
from agent_r1.tools.execution import run_detached
from agent_r1.workers.protocol import (
    ModelAnswer,
    ModelQuery,
    Opened,
    Stepped,
    encode_transition,
    images_of,
    with_images,
)

Answer = Opened | Stepped


class EnvironmentFailure(AgentR1Error):
    """Raised if the environment raises an error, or returns a value that cannot be used or sent."""


@dataclass(slots=True)
class WorkerSession:
    """An episode on a worker.

    Attributes:
        used: when the last request ended, on the clock of the event loop.
        lock: held while a request uses the episode.
    """

    name: str
    used: float
    episode: Episode | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queries: asyncio.Queue[ModelQuery] = field(default_factory=asyncio.Queue)
    _answers: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    _num_queries: int = 0
    _work: asyncio.Task[Answer] | None = None

    def models(self, roles: tuple[str, ...]) -> Mapping[str, ModelClient]:
        """Return a model for each role. The models forward the environment's queries to the run."""
        return {role: self._model(role) for role in roles}

    async def open(self, env: Env, task: Task, context: RolloutContext) -> Answer | ModelQuery:
        """Open the episode. Return its opening messages, or the environment's first query to a model."""

        async def work() -> Answer:
            self.episode = await run_detached(env.open(task, context))
            start = validate_messages(self.episode.start)
            return Opened(episode=self.name, start=encode_messages(start), images=images_of(start))

        return await self._start(work)

    async def step(self, action: Action) -> Answer | ModelQuery:
        """Run a step of the episode. Return the transition, or the environment's first query to a model."""
        episode = self.episode
        if episode is None or self._work is not None:
            raise EnvironmentFailure("the episode was not opened, or still works on another request")

        async def work() -> Answer:
            return encode_transition(validate_transition(await run_detached(episode.step(action))))

        return await self._start(work)

    async def answer(self, answer: ModelAnswer) -> Answer | ModelQuery:
        """Pass a model's answer to the environment, which then continues the interrupted :meth:`open` or :meth:`step`.

        Return the result of the continued method, or the environment's next query to a model.
        """
        waiting = self._answers.pop(answer.query, None)
        if waiting is None:
            raise EnvironmentFailure(f"no query {answer.query} waits for an answer")
        if not waiting.done():  # the environment may no longer wait
            if answer.error is None:
                waiting.set_result(with_images(decode_messages(answer.messages), answer.images)[0])
            else:
                waiting.set_exception(AgentR1Error(answer.error))
        return await self._advance()

    async def close(self) -> None:
        """Cancel the work of the environment, and close the episode."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        if self.episode is not None:
            await close_quietly(f"closing the episode {self.name}", self.episode.close())

    async def _start(self, work: Callable[[], Awaitable[Answer]]) -> Answer | ModelQuery:
        async def isolated() -> Answer:
            with isolate(EnvironmentFailure):
                return await work()

        self._work = child_task(isolated())
        return await self._advance()

    async def _advance(self) -> Answer | ModelQuery:
        """Return the environment's next query to a model, or the result of the current :meth:`open` or :meth:`step`."""
        assert self._work is not None
        query = asyncio.ensure_future(self._queries.get())
        try:
            await asyncio.wait([self._work, query], return_when=asyncio.FIRST_COMPLETED)
            if query.done():
                return query.result()
            work, self._work = self._work, None
            if work.cancelled():
                raise EnvironmentFailure("the episode was closed")
            return work.result()
        finally:
            query.cancel()

    def _model(self, role: str) -> ModelClient:
        async def respond(messages: tuple[Message, ...], /) -> Message:
            number = self._num_queries
            self._num_queries += 1
            answer = asyncio.get_running_loop().create_future()
            self._answers[number] = answer
            query = ModelQuery(
                episode=self.name,
                query=number,
                role=role,
                messages=encode_messages(messages),
                images=images_of(messages),
            )
            self._queries.put_nowait(query)
            return await answer

        return respond
