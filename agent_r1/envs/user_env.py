"""The other side of a conversation: an environment in which the agent speaks to a user, who may want what it hides.

A user is a function of the conversation: it holds no state of its own, so that an episode can be lived again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_r1.core.environment import Episode, ModelClient, RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
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
    """A user simulated by a model, which gets its persona as a system message and the agent's messages as its user's.

    The user ends the conversation with ``farewell``, or by returning no text twice in a row. It sees what the agent
    writes to it, without reasoning; actions that call tools and the results of calls are hidden from it. The roles
    alternate and the agent's comes first, as chat templates require.

    Attributes:
        persona: returns the system message: who the user is and what it wants.
        farewell: the text with which the user ends the conversation.
        client: the model (:func:`agent_r1.rollout.model_client.chat_client` wraps a frozen policy). None takes
            ``context.models["user"]``.

    Example:
        ModelUser(lambda task: f"You want {task.data['wish']}. Say DONE when you have it.", "DONE", client)
    """

    persona: Callable[[Task], str]
    farewell: str
    client: ModelClient | None = None

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        client = self.client or context.models.get("user")
        if client is None:
            raise InvalidInput("ModelUser", got="no model", do='give it a client, or a rollout context with models["user"]')
        messages = (Message.system(self.persona(task)), *_alternating(_heard(said)))
        text = (await client(messages)).text.strip()
        if not text:
            text = (await client(tuple(_alternating((*messages, Message.user(NUDGE)))))).text.strip()
        return Reply(text, end=not text or self.farewell in text)


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
