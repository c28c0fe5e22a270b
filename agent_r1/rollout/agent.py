"""The agent loop: one attempt at one task, from the first prompt to the end, whatever happens.

Nothing that an environment or an engine does leaves this module as an exception: it becomes the
trajectory's status and reason. Only cancellation from outside passes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent_r1.core.acting import Completion, Engine, Prompt, Sampling
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.core.world import Context, Env, Episode, Transition
from agent_r1.rollout.chat import Chat, Rewritten, View

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long an episode may take to close; after that it is left alone."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A policy that can act: an engine behind a chat format.

    ``sampling.max_tokens`` bounds one turn; ``context`` bounds the tokens of a state and its action.
    ``seed`` is the run's root seed, from which every turn draws its own.
    """

    engine: Engine
    chat: Chat
    sampling: Sampling
    context: int
    seed: int = 0

    async def live(self, env: Env, task: Task, context: Context) -> Trajectory:
        """One attempt. Returns a trajectory with the turns that were completed, however it ended."""
        life = _Life(self, env, task, context)
        try:
            async with asyncio.timeout_at(context.deadline):
                await life.run()
        except _Failure as failure:
            life.status, life.reason = failure.status, failure.reason
        except TimeoutError:
            life.status, life.reason = Status.CANCELLED, "the episode ran past its deadline"
        except Exception as error:
            # What an environment gave is only seen to be wrong where it is used.
            life.status, life.reason = Status.ENVIRONMENT_FAILED, _told(error)
        finally:
            await life.close()
        return life.trajectory()


class _Failure(Exception):
    """Carries a failure to the end of the episode."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@contextmanager
def _boundary(status: Status) -> Iterator[None]:
    """What is raised inside ends the episode with this status."""
    try:
        yield
    except _Failure:
        raise
    except Exception as error:
        raise _Failure(status, _told(error)) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class _Life:
    """The state of one attempt under way."""

    agent: Agent
    env: Env
    task: Task
    context: Context
    began: float = field(default_factory=time.perf_counter)
    episode: Episode | None = None
    said: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    status: Status = Status.COMPLETED
    reason: str | None = None

    async def run(self) -> None:
        """The loop: state -> action -> what happens -> next state."""
        with _boundary(Status.ENVIRONMENT_FAILED):
            self.episode = await self.env.open(self.task, self.context)
            self.said = self.episode.start
            view = self.agent.chat.open(self.said, self.env.tools)
        state, parent = view.ids, None
        while len(state) < self.agent.context:
            completion = await self._act(state)
            action = self.agent.chat.parse(completion.ids, len(self.turns))
            transition = await self._happen(action)
            self._remember(view, parent, completion, action, transition)
            if transition.end is not None:
                self.status = _ending(transition, completion)
                return
            view, state, parent = self._next_state(view, state, completion, action, transition)
        self.status = Status.OUT_OF_TOKENS

    async def _act(self, state: tuple[int, ...]) -> Completion:
        agent, turn = self.agent, len(self.turns)
        sampling = replace(
            agent.sampling,
            max_tokens=min(agent.sampling.max_tokens, agent.context - len(state)),
            stop_ids=(agent.chat.end_id,),
            seed=self.context.attempt.seed(agent.seed, turn),
        )
        with _boundary(Status.ENGINE_FAILED):
            completion = await agent.engine.generate(Prompt(state), sampling, str(self.context.attempt))
        if completion.stop == "cancelled":
            raise _Failure(Status.CANCELLED, "the engine cancelled the generation")
        return completion

    async def _happen(self, action: Action) -> Transition:
        assert self.episode is not None
        with _boundary(Status.ENVIRONMENT_FAILED):
            return await self.episode.step(action)

    def _remember(
        self, view: View, parent: int | None, completion: Completion, action: Action, transition: Transition
    ) -> None:
        self.turns.append(
            Turn(
                index=len(self.turns),
                parent=parent,
                new_ids=view.ids,
                action_ids=completion.ids,
                logprobs=completion.logprobs,
                spans=completion.spans,
                stop=completion.stop,
                action=action,
                observation=transition.messages,
                results=transition.results,
                rewards=dict(transition.rewards),
                call_rewards=tuple(dict(rewards) for rewards in transition.call_rewards),
                call_ends=self.agent.chat.call_ends(completion.ids) if action.message.calls else (),
            )
        )

    def _next_state(
        self, view: View, state: tuple[int, ...], completion: Completion, action: Action, transition: Transition
    ) -> tuple[View, tuple[int, ...], int | None]:
        """The next view and state, and the turn it continues (None: a new branch)."""
        with _boundary(Status.ENVIRONMENT_FAILED):
            grown = self.agent.chat.extend(
                view, self.said, action, completion.stop, transition.messages, self.env.tools
            )
        self.said = (*self.said, action.message, *transition.messages)
        if isinstance(grown, Rewritten):
            return grown, grown.ids, None
        return grown, state + completion.ids + grown.ids, self.turns[-1].index

    async def close(self) -> None:
        """Give back what the attempt held. A failing close is logged: the attempt is over all the same."""
        await self._give_back("releasing the session", self.agent.engine.release(str(self.context.attempt)))
        if self.episode is not None:
            await self._give_back("closing the episode", self.episode.close())

    async def _give_back(self, what: str, giving: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await giving
        except Exception as error:
            log.warning("%s of %s failed: %s", what, self.context.attempt, _told(error))

    def trajectory(self) -> Trajectory:
        return Trajectory(
            attempt=self.context.attempt,
            task_id=self.task.id,
            turns=tuple(self.turns),
            status=self.status,
            truncated=self.status in (Status.OUT_OF_TURNS, Status.OUT_OF_TOKENS),
            reason=self.reason,
            start=self.episode.start if self.episode else (),
            seconds=time.perf_counter() - self.began,
        )


def _ending(transition: Transition, completion: Completion) -> Status:
    if transition.end == "truncated":
        return Status.OUT_OF_TURNS
    return Status.OUT_OF_TOKENS if completion.stop == "length" else Status.COMPLETED
