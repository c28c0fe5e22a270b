"""The other side of a conversation: an environment in which the agent speaks to a user, who may want what it hides.

A user is a function of the conversation: it holds no state of its own, so that an episode can be lived again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_r1.core.environment import Episode, ModelClient, RolloutContext, Transition
from agent_r1.core.messages import Action, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Scorer
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import RewardFunction
from agent_r1.sandbox import Sandbox
from agent_r1.tools.function_tool import Tool


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

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        """What the user says after ``said``, the conversation up to and with the agent's last words.

        The same arguments give the same reply. May raise: the episode then counts as failed.
        """
        ...


class UserEnv:
    """An agent with tools that speaks to a user: calls are run, and an action without calls is said to the user.

    The user ends the conversation. What it says is an observation, like what a tool gives. After ``max_turns`` actions
    the episode is truncated.

    Args:
        tools, rewards, system, sandbox: as for :class:`~agent_r1.envs.tool_env.ToolEnv`.
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
        sandbox: Sandbox | str | None = None,
    ) -> None:
        self._acting = ToolEnv(tools, rewards, max_turns=max_turns, system=system, sandbox=sandbox)
        self.user, self.max_turns = user, max_turns
        self.tools: tuple[ToolSpec, ...] = self._acting.tools
        self.scorers: tuple[Scorer, ...] = self._acting.scorers

    @property
    def sandbox(self) -> str | None:
        """Where code that the policy wrote is held least; None where none runs."""
        return self._acting.sandbox

    async def open(self, task: Task, context: RolloutContext) -> Conversation:
        acting = await self._acting.open(task, context)
        return Conversation(self, task, context, acting, acting.start)


@dataclass(slots=True)
class Conversation:
    """One attempt with a user. ``said`` is the conversation so far, ``taken`` counts the actions."""

    env: UserEnv
    task: Task
    context: RolloutContext
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


OPENING = "(The conversation begins.)"
"""What a model that plays a user hears first, where the user speaks first."""

SILENCE = "(says nothing)"
"""What it hears of an agent that said nothing."""

NUDGE = "(You said nothing. Please answer.)"
"""What it hears after it said nothing itself."""


@dataclass(frozen=True, slots=True)
class ModelUser:
    """A user that a model plays: it is told in a system message who it is, and hears the agent as its user.

    ``ask`` is any model: a frozen policy (:func:`agent_r1.rollout.model_client.chat_client`) or an endpoint. ``part(task)`` says
    who the user is and what it wants. The user ends the conversation by saying ``farewell``, or by saying nothing
    though it was asked twice. It hears what the agent says to it, without thoughts that the chat keeps apart; an action
    that calls tools, well or badly, was not said to it, and what calls gave it does not see either. The two sides
    alternate, and the agent's is first, as chat templates ask for.

    Example:
        ModelUser(ask, lambda task: f"You want {task.data['wish']}. Say DONE when you have it.", "DONE")
    """

    ask: ModelClient
    part: Callable[[Task], str]
    farewell: str

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        told = (Message.system(self.part(task)), *_alternating(_heard(said)))
        text = await self._says(told) or await self._says(_alternating((*told, Message.user(NUDGE))))
        return Reply(text, end=not text or self.farewell in text)

    async def _says(self, told: Sequence[Message]) -> str:
        return (await self.ask(tuple(told))).text.strip()


def _heard(said: Sequence[Message]) -> Iterator[Message]:
    """The conversation from the user's side, where it is the assistant."""
    for message in said:
        if message.role == "user" and message.text:
            yield Message.assistant(message.text)
        elif message.role == "assistant" and not message.calls:
            yield Message.user(message.text.strip() or SILENCE)


def _alternating(messages: Iterable[Message]) -> list[Message]:
    """The messages with neighbours of one role made one, and something before an assistant that would be first."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            message = replace(message, parts=(*merged.pop().parts, Text("\n"), *message.parts))
        merged.append(message)
    return [Message.user(OPENING), *merged] if merged and merged[0].role == "assistant" else merged
