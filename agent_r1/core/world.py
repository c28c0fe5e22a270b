"""The world as an agent meets it: environments, episodes, and ready worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from agent_r1.core.attempt import Attempt
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.solution import Solutions
from agent_r1.core.task import Task, ToolResult
from agent_r1.core.trajectory import Scorer, Trajectory


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
class Context:
    """What an episode is given: its attempt, its own seed, a deadline (event-loop seconds), a model to ask."""

    attempt: Attempt
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

    async def open(self, task: Task, context: Context) -> Episode: ...


@runtime_checkable
class RunsCode(Protocol):
    """An environment, a scorer or a reward that runs code which the policy wrote says where: the level of the sandbox
    and its layers, ``none`` before any; None where it runs none. One of your own may have it too."""

    sandbox: Any


def least(levels: Iterable[str | None]) -> str | None:
    """Where code is held least: ``none`` before any level; None where no code runs.

    Example:
        >>> least(["bubblewrap: files user", None, "none: nothing"])
        'none: nothing'
    """
    return max(
        (level for level in levels if level is not None), key=lambda level: level.startswith("none"), default=None
    )


@dataclass(frozen=True, slots=True)
class World:
    """A ready world, as the doors use it.

    ``tasks(split)`` gives the tasks of a split. ``evaluation`` names the splits of the table,
    ``validation`` the split that chooses the checkpoint (None: the last step is kept).
    ``baselines`` are other environments over the same tasks, by the name of their row in the table
    (``naive-rag``). ``variants`` are further splits on which an agent may be tried, with the environment of each.
    ``measures`` gives further figures of scored attempts, by name; one that they say nothing of is left out.
    ``sandbox`` says in which level of it, and which layers, code runs that the policy wrote; None where none does.
    ``whole`` names the split of all tasks, where a world is made of a file: for evaluating what was not trained on it.
    ``recipe`` holds configuration defaults by dotted key, e.g.
    ``{"learner.learning_rate": 1e-3}``. ``solutions`` gives the right and wrong ways to act in a task, which
    ``agent-r1 check`` plays; None where a world cannot be checked.
    """

    name: str
    env: Env
    tasks: Callable[[str], Sequence[Task]]
    scorers: tuple[Scorer, ...]
    baselines: Mapping[str, Env] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    evaluation: tuple[str, ...] = ("test",)
    validation: str | None = None
    whole: str | None = None
    retrieval: Callable[[str], Mapping[str, float]] | None = None
    solutions: Callable[[Task], Solutions] | None = None
    variants: Mapping[str, Env] = field(default_factory=dict)
    measures: Callable[[Sequence[Trajectory]], Mapping[str, float]] | None = None
    sandbox: str | None = None

    def env_of(self, split: str) -> Env:
        """The environment that the tasks of a split are lived in."""
        return self.variants.get(split, self.env)
