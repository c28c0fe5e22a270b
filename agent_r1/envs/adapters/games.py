"""Episodes in which the policy speaks text and a game in a process of its own answers with text and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.adapters.processes import WorkerProcess, start_process, unwrap
from agent_r1.tools.tool_errors import ToolErrorKind, truncate_output

MAX_TEXT = 8000
"""Characters of one observation that a policy is shown."""

CLOSE_SECONDS = 2.0
"""What a game may take to close before its process is killed."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an action led to. ``valid`` is False where the text was no action; the game then stands as it stood.

    Example:
        Observation("The target number is higher.", reward=0.0)
    """

    text: str
    reward: float = 0.0
    end: Literal["terminal", "truncated"] | None = None
    valid: bool = True


class Game(Protocol):
    """What lives in the process: plain, blocking Python."""

    def open(self, seed: int, luck: int) -> Observation:
        """The first observation. ``seed`` makes the task, ``luck`` what each attempt draws for itself."""
        ...

    def step(self, text: str) -> Observation: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GameEnv:
    """An environment whose episodes are games, each in its own process.

    ``package`` is imported once, ``game`` (``module:class``) made with ``keywords`` in each process. A task's
    ``data["seed"]`` is the seed of its game, so that all attempts at a task meet the same; a task without one
    differs by attempt. A game that raises, dies or takes longer than ``timeout`` seconds for an action fails its
    episode and no other. After ``max_turns`` actions the episode is truncated.
    """

    package: str
    game: str
    keywords: Mapping[str, Any]
    max_turns: int
    timeout: float
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> GameEpisode:
        """Raises AgentR1Error where the game cannot be started."""
        process = await start_process(self.package, self.game, self.keywords, self.timeout)
        episode = GameEpisode(self, process, ())
        try:
            luck = context.seed % 2**31
            first = await episode.ask("open", int(task.data.get("seed", luck)), luck)
        except BaseException:
            await process.end()
            raise
        episode.start = with_observation(task, first.text)
        return episode


@dataclass(slots=True)
class GameEpisode:
    """One attempt in a game. ``taken`` counts the actions so far."""

    env: GameEnv
    process: WorkerProcess
    start: tuple[Message, ...]
    taken: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.taken += 1
        seen = await self.ask("step", action.message.text)
        if seen.end is None and self.taken >= self.env.max_turns:
            seen = replace(seen, end="truncated")
        return to_transition(seen)

    async def close(self) -> None:
        await self.process.call("close", timeout=CLOSE_SECONDS)
        await self.process.end()

    async def ask(self, method: str, *arguments: Any) -> Observation:
        outcome = await self.process.call(method, *arguments, timeout=self.env.timeout)
        return Observation(**unwrap(outcome, f"{self.env.package}: {method}"))


def with_observation(task: Task, observation: str) -> tuple[Message, ...]:
    """The task's messages and the first observation, which joins a user message that stands last.

    Some chat templates refuse two user messages in a row.
    """
    observation = _cut(observation)
    if task.messages and task.messages[-1].role == "user":
        last = task.messages[-1]
        return (*task.messages[:-1], replace(last, parts=(*last.parts, Text(f"\n\n{observation}"))))
    return (*task.messages, Message.user(observation))


def to_transition(seen: Observation) -> Transition:
    """The observation as a user message; its reward is kept in ``results``, for :func:`episode_return`."""
    text = Text(_cut(seen.text))
    error = None if seen.valid else ToolErrorKind.INVALID_ARGUMENTS
    result = ToolResult((text,), ok=seen.valid, error=error, data=seen.reward)
    messages = (Message("user", (text,)),) if seen.end is None else ()
    return Transition(messages, end=seen.end, results=(result,))


def _cut(text: str) -> str:
    (part,) = truncate_output(ToolResult((Text(text),), ok=True), MAX_TEXT).parts
    return part.text if isinstance(part, Text) else ""


def episode_return(trajectory: Trajectory, task: Task) -> tuple[float, ...]:
    """The reward of the environment for each turn; the episode's return is their sum."""
    return tuple(float(sum(result.data for result in turn.results)) for turn in trajectory.turns)
