"""Environments, episodes, and the context that an episode runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.messages import Action, Message, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of an action in an environment."""

    messages: tuple[Message, ...]  # the observation, which is appended to the conversation
    rewards: Mapping[str, float] = field(default_factory=dict)  # process rewards of the whole action, by name
    end: Literal["terminal", "truncated"] | None = None  # truncated: the episode was cut off; None: it goes on
    results: tuple[ToolResult, ...] = ()
    call_rewards: tuple[Mapping[str, float], ...] = ()  # of each tool call, in order; (): no call is rewarded


class ModelClient(Protocol):
    """A model that answers a conversation, such as a frozen policy. Any async function of this signature is one."""

    async def __call__(self, messages: tuple[Message, ...], /) -> Message: ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The context of one attempt.

    ``models`` are the models that the environment may query, by role: "user", "judge", "reward" and "policy". Inside an
    agent loop, "policy" is always present.
    """

    id: AttemptId
    seed: int
    deadline: float | None = None  # when the attempt is cancelled, on the event loop's clock (``loop.time()``)
    models: Mapping[str, ModelClient] = field(default_factory=dict)


class Episode(Protocol):
    """One conversation of the policy with an environment. ``start`` holds the opening messages."""

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition: ...

    async def close(self) -> None: ...


@runtime_checkable
class Env(Protocol):
    """An environment, shared by all attempts. ``open`` returns a new episode for one attempt."""

    tools: tuple[ToolSpec, ...]

    async def open(self, task: Task, context: RolloutContext) -> Episode: ...


@runtime_checkable
class EnvByTask(Env, Protocol):
    """An environment that stands for a different one in each task, for example one with the task's own tools.

    ``tools`` are not shown to the policy: the tools of ``for_task(task)`` are.
    """

    def for_task(self, task: Task) -> Env: ...


def env_of(env: Env, task: Task) -> Env:
    """Return the environment in which ``task`` is played: ``env``, unless it is a different one in each task."""
    return env.for_task(task) if isinstance(env, EnvByTask) else env


@dataclass(slots=True)
class Environments:
    """Several environments by name. A task is played in the one that ``Task.env`` names.

    An entry such as "wiki/renamed" replaces the environment "wiki" for the tasks of the split "renamed".
    """

    by_name: Mapping[str, Env]
    tools: tuple[ToolSpec, ...] = ()

    def for_task(self, task: Task) -> Env:
        """Return the environment of a task. Raise InvalidInput if the task names none of these."""
        found = self.by_name.get(task.env_split, self.by_name.get(task.env))
        if found is None:
            known = [name for name in self.by_name if "/" not in name]
            got, do = (repr(task.env), suggest(task.env, known)) if task.env else ("none", "")
            raise InvalidInput(f"env of task {task.id}", got=got, do=f"{do} give one of {', '.join(known)}".strip())
        return env_of(found, task)

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        return await self.for_task(task).open(task, context)


def named_envs(env: Env) -> Mapping[str, Env]:
    """Return all environments by name. The name of a single environment is ""."""
    return env.by_name if isinstance(env, Environments) else {"": env}


@runtime_checkable
class ExecutesCode(Protocol):
    """An environment, scorer or reward that can execute code written by the policy.

    ``sandbox`` describes the isolation of the code, such as "bubblewrap: files user". The text begins with "none" if
    the code is not isolated. If no code is executed, ``sandbox`` is None.
    """

    sandbox: Any


def weakest_sandbox(levels: Iterable[str | None]) -> str | None:
    """Return the first text that begins with "none", otherwise the first text. If all items are None, return None."""
    known = [level for level in levels if level is not None]
    return max(known, key=lambda level: level.startswith("none"), default=None)
