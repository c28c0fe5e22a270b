"""An agent that is no model: what it says next, someone decides who sees the messages and no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_r1.core.acting import Completion, Prompt, Sampling, Weights
from agent_r1.core.attempt import Attempt
from agent_r1.core.messages import Action, Message
from agent_r1.core.solution import Act
from agent_r1.core.task import Task
from agent_r1.core.world import Context, Env, Episode, Transition
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.byte_tokenizer import byte_tokenizer
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.scripted_engine import completion_of

ENDLESS = 10**9
"""Tokens: nobody who is no model runs out of them."""


class Performer:
    """Engine and environment in one: it says what ``casting(attempt)`` decides, in the episodes of ``env``.

    What it says goes the way of all that a policy says: through the chat's tokens, the parser, the agent loop and the
    environment. Live it as ``performer.agent.live(performer, task, context)``, or give both to a collector. An ``Act``
    that raises fails the engine for its attempt.

    Example:
        Performer(env, lambda attempt: script(Message.assistant("<answer>Bruno</answer>")))
    """

    def __init__(self, env: Env, casting: Callable[[Attempt], Act]) -> None:
        self._env, self._casting = env, casting
        self._chat = Chat(byte_tokenizer())
        self._roles: dict[str, _Role] = {}
        self.tools = env.tools
        self.agent = Agent(self, self._chat, Sampling(max_tokens=ENDLESS), ENDLESS)

    async def open(self, task: Task, context: Context) -> Episode:
        episode = await self._env.open(task, context)
        role = _Role(episode, self._casting(context.attempt), list(episode.start))
        self._roles[str(context.attempt)] = role
        return role

    async def generate(self, prompt: Prompt, sampling: Sampling, session: str | None = None) -> Completion:
        await asyncio.sleep(0)
        role = self._roles[str(session)]
        message = role.act(tuple(role.said), role.turn)
        return completion_of(self._chat, self._worded(tuple(role.said), message), sampling, 0)

    def _worded(self, said: tuple[Message, ...], message: Message) -> str:
        """The message as the chat's template words it."""
        before = self._chat.render(said, self.tools, speak=True)
        after = self._chat.render((*said, message), self.tools, speak=False)
        end = str(self._chat.tokenizer.decode([self._chat.end_id]))
        return after.removeprefix(before).rpartition(end)[0]

    async def load(self, weights: Weights) -> None:
        """There are no weights."""

    async def digest(self) -> str:
        return "no weights"

    async def release(self, session: str) -> None:
        self._roles.pop(session, None)


@dataclass(slots=True)
class _Role:
    """An episode whose conversation is followed."""

    episode: Episode
    act: Act
    said: list[Message]
    start: tuple[Message, ...] = field(init=False)
    turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.start = self.episode.start

    async def step(self, action: Action) -> Transition:
        self.turn += 1
        transition = await self.episode.step(action)
        self.said += (action.message, *transition.messages)
        return transition

    async def close(self) -> None:
        await self.episode.close()
