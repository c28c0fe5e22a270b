"""``UserEnv``: an environment in which the agent talks to a user: a model or a program.

In equal conversations about the same task, a user must give equal replies, so that an episode can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_r1.core.environment import Episode, ModelClient, RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, Text, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Scorer
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import RewardFunction
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tools.function_tool import Tool


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the user. If ``end`` is True, the conversation ends, and the agent does not see the text."""

    text: str
    end: bool = False


class User(Protocol):
    async def reply(self, task: Task, messages: Sequence[Message], context: RolloutContext, /) -> Reply:
        """Return the user's reply to the conversation ``messages``, which ends with a message of the agent.

        Equal arguments must give equal replies. If the function raises, the episode fails.
        """
        ...


class UserEnv:
    """The environment of an agent that has tools and talks to a user.

    If an action has tool calls, the calls are run. An action without calls is a message to the user, and the user's
    reply is the observation. The episode ends (terminal) when the user ends the conversation. After ``max_turns``
    actions the episode is truncated.

    Args:
        tools, rewards, system, sandbox: see :class:`~agent_r1.envs.tool_env.ToolEnv`.
        user: the user.
        max_turns: the largest number of actions per episode, including actions that call tools.
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
        self._tool_env = ToolEnv(tools, rewards, max_turns=max_turns, system=system, sandbox=sandbox)
        self.user, self.max_turns = user, max_turns
        self.tools: tuple[ToolSpec, ...] = self._tool_env.tools
        self.scorers: tuple[Scorer, ...] = self._tool_env.scorers

    @property
    def sandbox(self) -> str | None:
        return self._tool_env.sandbox

    async def open(self, task: Task, context: RolloutContext) -> UserEpisode:
        tool_episode = await self._tool_env.open(task, context)
        return UserEpisode(self, task, context, tool_episode, tool_episode.start)


@dataclass(slots=True)
class UserEpisode:
    env: UserEnv
    task: Task
    context: RolloutContext
    tool_episode: Episode
    start: tuple[Message, ...]
    messages: tuple[Message, ...] = field(init=False)
    num_actions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.messages = self.start

    async def step(self, action: Action) -> Transition:
        self.num_actions += 1
        transition = await self.tool_episode.step(action)
        self.messages += (action.message, *transition.messages)
        if action.message.calls:
            return transition
        reply = await self.env.user.reply(self.task, self.messages, self.context)
        if reply.end:
            return transition
        if self.num_actions >= self.env.max_turns:
            return replace(transition, end="truncated")
        message = Message.user(reply.text)
        self.messages += (message,)
        return replace(transition, messages=(message,), end=None)

    async def close(self) -> None:
        await self.tool_episode.close()


OPENING = "(The conversation begins.)"
"""The first message to the model that plays the user, if the user begins the conversation."""

SILENCE = "(says nothing)"
"""The text that replaces an empty message of the agent, for the model that plays the user."""

NUDGE = "(You said nothing. Please answer.)"
"""The message to the model that plays the user, after an empty reply."""


@dataclass(frozen=True, slots=True)
class ModelUser:
    """A simulated user: a model writes the user's messages.

    The model gets the conversation with exchanged roles: the agent's messages are user messages, and the user's
    messages are assistant messages. The model does not see the agent's reasoning, tool calls and tool results. If the
    model's reply is empty, the model is asked once more. A second empty reply ends the conversation.
    """

    persona: Callable[[Task], str]  # task -> system message: who the user is and what the user wants
    farewell: str  # a text that ends the conversation if the user's reply contains it
    client: ModelClient | None = None  # None: context.models["user"]

    async def reply(self, task: Task, messages: Sequence[Message], context: RolloutContext, /) -> Reply:
        client = self.client or context.models.get("user")
        if client is None:
            do = 'give it a client, or a rollout context with models["user"]'
            raise InvalidInput("ModelUser", got="no model", do=do)
        prompt = (Message.system(self.persona(task)), *_merge_roles(_exchange_roles(messages)))
        text = (await client(prompt)).text.strip()
        if not text:
            text = (await client(tuple(_merge_roles((*prompt, Message.user(NUDGE)))))).text.strip()
        return Reply(text, end=not text or self.farewell in text)


def _exchange_roles(messages: Sequence[Message]) -> Iterable[Message]:
    for message in messages:
        if message.role == "user" and message.text:
            yield Message.assistant(message.text)
        elif message.role == "assistant" and not message.calls:
            yield Message.user(message.text.strip() or SILENCE)


def _merge_roles(messages: Iterable[Message]) -> list[Message]:
    # Many chat templates reject two messages of one role in a row, and an assistant message at the start.
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            message = replace(message, parts=(*merged.pop().parts, Text("\n"), *message.parts))
        merged.append(message)
    return [Message.user(OPENING), *merged] if merged and merged[0].role == "assistant" else merged
