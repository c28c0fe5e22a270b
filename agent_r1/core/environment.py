"""The world as an agent meets it: environments, episodes, and ready worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec


@dataclass(frozen=True, slots=True)
class Transition:
    """What an action led to: messages to append, process rewards by name, and whether the episode ended.

    ``rewards`` are for the action as a whole, ``call_rewards`` for its calls: one mapping per call, in their
    order, or () where no call is rewarded.

    Example:
        Transition((Message.tool("Alba: mayor Bruno.", "call_0_0"),), call_rewards=({"found": 1.0},))
    """

    messages: tuple[Message, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    end: Literal["terminal", "truncated"] | None = None
    results: tuple[ToolResult, ...] = ()
    call_rewards: tuple[Mapping[str, float], ...] = ()


Ask = Callable[[tuple[Message, ...]], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What an episode is given: its attempt, its own seed, a deadline (event-loop seconds), a model to ask."""

    attempt: AttemptId
    seed: int
    deadline: float | None = None
    ask: Ask | None = None


class Episode(Protocol):
    """One attempt in a world. It only appends; the agent loop's context rule owns the view."""

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


@runtime_checkable
class Env(Protocol):
    """A world as a shareable description."""

    tools: tuple[ToolSpec, ...]

    async def open(self, task: Task, context: RolloutContext) -> Episode: ...


@runtime_checkable
class ExecutesCode(Protocol):
    """An environment, a scorer or a reward that runs code which the policy wrote says where: the level of the sandbox
    and its layers, ``none`` before any; None where it runs none. One of your own may have it too."""

    sandbox: Any


def weakest_sandbox(levels: Iterable[str | None]) -> str | None:
    """Where code is held weakest_sandbox: ``none`` before any level; None where no code runs.

    Example:
        >>> weakest_sandbox(["bubblewrap: files user", None, "none: nothing"])
        'none: nothing'
    """
    return max(
        (level for level in levels if level is not None), key=lambda level: level.startswith("none"), default=None
    )
