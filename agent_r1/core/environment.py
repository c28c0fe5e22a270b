"""Environments, episodes, and the context that an episode runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_r1.core.messages import Action, Message, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of an action in an environment.

    Attributes:
        messages: the observation, which is appended to the conversation.
        rewards: process rewards of the action as a whole, by name.
        end: None if the episode goes on; "terminal" if it is over; "truncated" if it was cut off.
        call_rewards: for each tool call, in order, its process rewards by name. (): no call is rewarded.

    Example:
        Transition((Message.tool("Alba: mayor Bruno.", "call_0_0"),), call_rewards=({"found": 1.0},))
    """

    messages: tuple[Message, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    end: Literal["terminal", "truncated"] | None = None
    results: tuple[ToolResult, ...] = ()
    call_rewards: tuple[Mapping[str, float], ...] = ()


class ModelClient(Protocol):
    """A model that answers a conversation, such as a frozen policy or a remote endpoint.

    Any async function with the signature of ``__call__`` is a ModelClient.
    """

    async def __call__(self, messages: tuple[Message, ...], /) -> Message: ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The context of one attempt.

    Attributes:
        deadline: when the attempt is cancelled, on the event loop's clock (``loop.time()``). None: never.
        models: models that the environment may query, by role: "user", "judge", "reward" and "policy". Inside an agent
            loop, "policy" is always present.

    Example:
        reply = await context.models["user"]((Message.user("Where is my order?"),))
    """

    id: AttemptId
    seed: int
    deadline: float | None = None
    models: Mapping[str, ModelClient] = field(default_factory=dict)


class Episode(Protocol):
    """One conversation of the policy with an environment.

    ``start`` holds the opening messages. ``step`` takes an action of the policy, and returns the messages to append.
    """

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


@runtime_checkable
class Env(Protocol):
    """An environment, shared by all attempts. ``open`` returns a new episode for one attempt."""

    tools: tuple[ToolSpec, ...]

    async def open(self, task: Task, context: RolloutContext) -> Episode: ...


@runtime_checkable
class ExecutesCode(Protocol):
    """An environment, scorer or reward that can execute code written by the policy.

    ``sandbox`` is a text that describes the isolation of the code, such as "bubblewrap: files user". The text begins
    with "none" if the code is not isolated. If no code is executed, there is no text: ``sandbox`` is None.
    """

    sandbox: Any


def weakest_sandbox(levels: Iterable[str | None]) -> str | None:
    """Return the weakest sandbox in ``levels``: the first text that begins with "none", otherwise the first text.

    If all items are None, return None.
    """
    return max(
        (level for level in levels if level is not None), key=lambda level: level.startswith("none"), default=None
    )
