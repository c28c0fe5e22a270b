"""Environments, episodes, and the context that an episode runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of an action in an environment.

    Attributes:
        messages: the observation, which is appended to the conversation.
        rewards: process rewards of the action as a whole, by name.
        end: None if the episode goes on; "terminal" if the episode is over; "truncated" if the episode was cut off. A
            critic can estimate the rewards after a cut (bootstrap).
        results: the results of the tool calls that were run.
        call_rewards: process rewards of each call, in the order of the calls, or () if no call is rewarded.

    Example:
        Transition((Message.tool("Alba: mayor Bruno.", "call_0_0"),), call_rewards=({"found": 1.0},))
    """

    messages: tuple[Message, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    end: Literal["terminal", "truncated"] | None = None
    results: tuple[ToolResult, ...] = ()
    call_rewards: tuple[Mapping[str, float], ...] = ()


class ModelClient(Protocol):
    """A model that answers a conversation: a frozen policy, a remote endpoint, or an async function.

    Any async function with the signature of ``__call__`` can be a model.
    """

    async def __call__(self, messages: tuple[Message, ...], /) -> Message: ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The context of one attempt, given to its rollout and its environment.

    Attributes:
        id: identifies the attempt.
        seed: the attempt's own seed.
        deadline: the time of the event loop, in seconds, at which the attempt is cancelled; None if it has no deadline.
        models: models that the environment may query, by role: "policy" (the policy itself, always present inside an
            agent loop), "user", "judge", "reward".

    Example:
        reply = await context.models["user"]((Message.user("Where is my order?"),))
    """

    id: AttemptId
    seed: int
    deadline: float | None = None
    models: Mapping[str, ModelClient] = field(default_factory=dict)


class Episode(Protocol):
    """One attempt in an environment.

    ``start`` holds the opening messages of the conversation. Each call of ``step`` returns messages to append to the
    conversation. The context policy of the agent loop decides which messages of the conversation the policy sees.
    """

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


@runtime_checkable
class Env(Protocol):
    """The description of an environment, which all attempts share. Each attempt opens an episode of its own."""

    tools: tuple[ToolSpec, ...]

    async def open(self, task: Task, context: RolloutContext) -> Episode: ...


@runtime_checkable
class ExecutesCode(Protocol):
    """An environment, scorer or reward that can execute code written by the policy.

    Attributes:
        sandbox: the isolation level and its layers as text ("none: .." if there is no isolation); None if no code is
            executed.
    """

    sandbox: Any


def weakest_sandbox(levels: Iterable[str | None]) -> str | None:
    """Return the weakest of several isolation levels. None stands for a component that executes no code.

    Return the first level that begins with "none", or the first level if no level begins with "none". Return None if no
    component executes code.

    Example:
        >>> weakest_sandbox(["bubblewrap: files user", None, "none: nothing"])
        'none: nothing'
    """
    return max(
        (level for level in levels if level is not None), key=lambda level: level.startswith("none"), default=None
    )
