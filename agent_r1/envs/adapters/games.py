"""Episodes in which the policy plays a game in text. Each game runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, Text, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.adapters.processes import WorkerProcess, start_process, unwrap
from agent_r1.tools.tool_errors import ToolErrorKind, truncate_output

MAX_TEXT = 8000
"""The maximum number of characters of an observation. A longer text is cut before the policy sees the text."""

CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of opening a game, or of an action in a game.

    Attributes:
        text: the text that the policy sees.
        reward: the reward of the action.
        end: how the game ended; None if the game continues.
        valid: False if the policy's text was not an action. The game has then not changed.

    Example:
        Observation("The target number is higher.", reward=0.0)
    """

    text: str
    reward: float = 0.0
    end: Literal["terminal", "truncated"] | None = None
    valid: bool = True


class Game(Protocol):
    """A game. The game runs in a process of its own, so its methods are allowed to block."""

    def open(self, seed: int, attempt_seed: int) -> Observation:
        """Start the game, and return the first observation.

        Args:
            seed: determines the content of the game, such as a secret number. Equal for all attempts at a task.
            attempt_seed: determines other random draws, such as an opponent's moves. Different for each attempt.
        """
        ...

    def step(self, text: str) -> Observation: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GameEnv:
    """An environment whose episodes are games. Each game runs in a process of its own.

    All attempts at a task play the same game, which the seed ``task.data["seed"]`` determines. If a task has no seed,
    each attempt plays another game. If a game raises, crashes or exceeds the time limit, only its own episode
    fails. After ``max_turns`` actions the episode is truncated.

    Attributes:
        package: the name of a module. The module is imported once, before the processes are forked.
        game: the class of the game, as ``module:class`` (see :class:`Game`).
        keywords: the keyword arguments with which ``game`` is called, as JSON values.
        timeout: the time limit of an action in seconds.
    """

    package: str
    game: str
    keywords: Mapping[str, Any]
    max_turns: int
    timeout: float
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> GameEpisode:
        """Start the game of ``task`` and return the episode. Raise AgentR1Error if the game cannot be started."""
        process = await start_process(self.package, self.game, self.keywords, self.timeout)
        episode = GameEpisode(self, process, ())
        try:
            attempt_seed = context.seed % 2**31
            first = await episode.call("open", int(task.data.get("seed", attempt_seed)), attempt_seed)
        except BaseException:
            await process.kill()
            raise
        episode.start = add_observation(task, first.text)
        return episode


@dataclass(slots=True)
class GameEpisode:
    env: GameEnv
    process: WorkerProcess
    start: tuple[Message, ...]
    num_actions: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.num_actions += 1
        observation = await self.call("step", action.message.text)
        if observation.end is None and self.num_actions >= self.env.max_turns:
            observation = replace(observation, end="truncated")
        return to_transition(observation)

    async def close(self) -> None:
        await self.process.call("close", timeout=CLOSE_SECONDS)
        await self.process.kill()

    async def call(self, method: str, *arguments: Any) -> Observation:
        outcome = await self.process.call(method, *arguments, timeout=self.env.timeout)
        return Observation(**unwrap(outcome, f"{self.env.package}: {method}"))


def add_observation(task: Task, observation: str) -> tuple[Message, ...]:
    """Return the opening messages of an episode: the messages of the task, then the first observation of the game.

    The observation is added to the last message if this is a user message, because some chat templates reject two user
    messages in a row.
    """
    observation = _truncate(observation)
    if task.messages and task.messages[-1].role == "user":
        last = task.messages[-1]
        return (*task.messages[:-1], replace(last, parts=(*last.parts, Text(f"\n\n{observation}"))))
    return (*task.messages, Message.user(observation))


def to_transition(observation: Observation) -> Transition:
    """Convert an observation of a game to a transition.

    If the game continues, the text of the observation becomes a user message. The reward of the game is stored as the
    ``data`` of a tool result, although the policy calls no tool.
    """
    text = Text(_truncate(observation.text))
    error = None if observation.valid else ToolErrorKind.INVALID_ARGUMENTS
    result = ToolResult((text,), ok=observation.valid, error=error, data=observation.reward)
    messages = (Message("user", (text,)),) if observation.end is None else ()
    return Transition(messages, end=observation.end, results=(result,))


def _truncate(text: str) -> str:
    (part,) = truncate_output(ToolResult((Text(text),), ok=True), MAX_TEXT).parts
    return part.text if isinstance(part, Text) else ""


def seeded_tasks(name: str, messages: tuple[Message, ...], train: int, test: int, seed: int) -> list[Task]:
    """Return tasks of two splits. ``train`` and ``test`` are the numbers of tasks in the splits "train" and "test".

    Each task has a game seed of its own in ``data["seed"]``. The game seeds are consecutive integers from
    ``seed * 1_000_003``. ``name`` is the first part of each task's id, such as "Wordle-v0" in "Wordle-v0/17".
    """
    first = seed * 1_000_003
    return [
        Task(f"{name}/{first + n}", messages, {"seed": first + n}, "train" if n < train else "test")
        for n in range(train + test)
    ]


def episode_return(trajectory: Trajectory, task: Task) -> tuple[float, ...]:
    """Return the reward of the game for each turn. The sum of these rewards is the return of the episode."""
    return tuple(float(sum(result.data for result in turn.results)) for turn in trajectory.turns)
