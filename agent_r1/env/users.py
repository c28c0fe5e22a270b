"""The other side of a conversation: an environment in which the agent speaks to a user, who may want what it hides.

A user is a function of the conversation: it holds no state of its own, so that an episode can be lived again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Scorer
from agent_r1.core.world import Ask, Context, Episode, Transition
from agent_r1.env.scoring import RewardFunction
from agent_r1.env.toolenv import ToolEnv
from agent_r1.env.tools import Tool


@dataclass(frozen=True, slots=True)
class Reply:
    """What the user says; ``end`` says that with it the conversation is over, and the agent does not hear it.

    Example:
        Reply("The order is A17.")
        Reply("", end=True)
    """

    text: str
    end: bool = False


class User(Protocol):
    """Answers the agent."""

    async def reply(self, task: Task, said: Sequence[Message], context: Context) -> Reply:
        """What the user says after ``said``, the conversation up to and with the agent's last words.

        The same arguments give the same reply. May raise: the episode then counts as failed.
        """
        ...


class UserEnv:
    """An agent with tools that speaks to a user: calls are run, and an action without calls is said to the user.

    The user ends the conversation. What it says is an observation, like what a tool gives. After ``max_turns`` actions
    the episode is truncated.

    Args:
        tools, rewards, system: as for :class:`~agent_r1.env.toolenv.ToolEnv`.
        user: the other side.
        max_turns: actions per episode, those that call tools and those that speak.

    Raises:
        InvalidInput: as ToolEnv does.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        user: User,
        rewards: Sequence[RewardFunction] = (),
        *,
        max_turns: int = 12,
        system: str | None = None,
    ) -> None:
        self._acting = ToolEnv(tools, rewards, max_turns=max_turns, system=system)
        self.user, self.max_turns = user, max_turns
        self.tools: tuple[ToolSpec, ...] = self._acting.tools
        self.scorers: tuple[Scorer, ...] = self._acting.scorers

    async def open(self, task: Task, context: Context) -> Conversation:
        acting = await self._acting.open(task, context)
        return Conversation(self, task, context, acting, acting.start)


@dataclass(slots=True)
class Conversation:
    """One attempt with a user. ``said`` is the conversation so far, ``taken`` counts the actions."""

    env: UserEnv
    task: Task
    context: Context
    acting: Episode
    start: tuple[Message, ...]
    said: tuple[Message, ...] = field(init=False)
    taken: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.said = self.start

    async def step(self, action: Action) -> Transition:
        self.taken += 1
        happened = await self.acting.step(action)
        self.said += (action.message, *happened.messages)
        if action.message.calls:
            return happened
        reply = await self.env.user.reply(self.task, self.said, self.context)
        if reply.end:
            return happened
        if self.taken >= self.env.max_turns:
            return replace(happened, end="truncated")
        heard = Message.user(reply.text)
        self.said += (heard,)
        return replace(happened, messages=(heard,), end=None)

    async def close(self) -> None:
        await self.acting.close()


@dataclass(frozen=True, slots=True)
class ModelUser:
    """A user that a model plays: it is told in a system message who it is, and hears the agent as its user.

    ``ask`` is any model: a frozen policy (:func:`agent_r1.rollout.asking.asking`) or an endpoint. ``part(task)`` says
    who the user is and what it wants. The user ends the conversation by saying ``farewell``. It sees neither the
    agent's calls nor what they gave.

    Example:
        ModelUser(ask, lambda task: f"You want {task.data['wish']}. Say DONE when you have it.", "DONE")
    """

    ask: Ask
    part: Callable[[Task], str]
    farewell: str

    async def reply(self, task: Task, said: Sequence[Message], context: Context) -> Reply:
        """Raises AgentR1Error where the model says nothing."""
        heard = (_from_the_other_side(message) for message in said if message.role in ("user", "assistant"))
        told = [message for message in heard if message.text]
        text = (await self.ask((Message.system(self.part(task)), *told))).text.strip()
        if not text:
            raise AgentR1Error("the model that plays the user said nothing")
        return Reply(text, end=self.farewell in text)


def _from_the_other_side(message: Message) -> Message:
    return Message.assistant(message.text) if message.role == "user" else Message.user(message.text)
