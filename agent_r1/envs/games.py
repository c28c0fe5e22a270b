"""Games in text of Gymnasium and TextArena. Each game runs in a process of its own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import InvalidInput, import_extra, suggest
from agent_r1.core.messages import Action, Message, Text, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.fork_server import import_attribute
from agent_r1.envs.processes import WorkerProcess, start_process, unwrap
from agent_r1.tools.tool_errors import ToolErrorKind, truncate_output

MAX_TEXT = 8000
"""The maximum number of characters of an observation. A longer text is cut."""

CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of opening a game, or of an action in a game."""

    text: str  # what the policy sees
    reward: float = 0.0
    end: Literal["terminal", "truncated"] | None = None
    valid: bool = True  # False: the policy's text was not an action, and the game has not changed


class TextGame(Protocol):
    """A game. It runs in a process of its own, so its methods are allowed to block."""

    def open(self, seed: int, attempt_seed: int) -> Observation:
        """Start the game, and return the first observation."""
        ...

    def step(self, text: str) -> Observation: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GameEnv:
    """An environment whose episodes are games. Each game runs in a process of its own.

    All attempts at a task play the same game, which the seed ``task.data["seed"]`` determines. If a task has no seed,
    each attempt plays another game. If a game raises, crashes or exceeds the time limit, only its own episode
    fails. After ``max_turns`` actions the episode is truncated.
    """

    package: str  # a module that is imported once, before the processes are forked
    game: str  # ``module:class`` of a TextGame
    keywords: Mapping[str, Any]  # for the constructor of the game, as JSON values
    max_turns: int
    timeout: float  # of an action, in seconds
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> GameEpisode:
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
    """Return the opening messages of an episode: the messages of the task, then the first observation of the game."""
    observation = _truncate(observation)
    # Some chat templates reject two user messages in a row.
    if task.messages and task.messages[-1].role == "user":
        last = task.messages[-1]
        return (*task.messages[:-1], replace(last, parts=(*last.parts, Text(f"\n\n{observation}"))))
    return (*task.messages, Message.user(observation))


def to_transition(observation: Observation) -> Transition:
    """Convert an observation of a game to a transition. If the game continues, the text becomes a user message."""
    # The reward is the data of a tool result, although the policy calls no tool, because episode_return reads results.
    text = Text(_truncate(observation.text))
    error = None if observation.valid else ToolErrorKind.INVALID_ARGUMENTS
    result = ToolResult((text,), ok=observation.valid, error=error, data=observation.reward)
    messages = (Message("user", (text,)),) if observation.end is None else ()
    return Transition(messages, end=observation.end, results=(result,))


def _truncate(text: str) -> str:
    (part,) = truncate_output(ToolResult((Text(text),), ok=True), MAX_TEXT).parts
    return part.text if isinstance(part, Text) else ""


def seeded_tasks(name: str, messages: tuple[Message, ...], train: int, test: int, seed: int) -> list[Task]:
    """Return ``train`` and ``test`` tasks of the splits "train" and "test", each with its own ``data["seed"]``."""
    first = seed * 1_000_003
    return [
        Task(f"{name}/{first + n}", messages, {"seed": first + n}, "train" if n < train else "test")
        for n in range(train + test)
    ]


def episode_return(trajectory: Trajectory, task: Task) -> tuple[float, ...]:
    """Return the reward of the game for each turn."""
    return tuple(float(sum(result.data for result in turn.results)) for turn in trajectory.turns)


class Gymnasium:
    """An environment of Gymnasium (https://gymnasium.farama.org) as text, with ``Discrete`` or ``Text`` actions.

    The policy writes a ``Discrete`` action as its name or its index, from 0. If the policy's text is not an action, the
    policy gets an explanation. The environment then makes no step, but the turn counts towards ``max_turns``.

    Observations that are text are shown unchanged. For any other observation, the policy sees the rendered environment
    if ``render_mode`` is "ansi", otherwise the observation as JSON.

    Args:
        name: the name for ``gymnasium.make``. With ``module:Name-v0``, the module is imported first.
        actions: names for the actions of a ``Discrete`` action space, by index.
        options: arguments for ``gymnasium.make`` and the environment, e.g. ``{"render_mode": "ansi"}``.
        timeout: the time limit of an action in seconds.
    """

    def __init__(
        self,
        name: str,
        actions: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        *,
        max_turns: int = 50,
        timeout: float = 20.0,
    ) -> None:
        self.name, self.actions = name, tuple(actions)
        keywords = {"name": name, "actions": list(actions), "options": dict(options or {})}
        GymnasiumGame(name, actions, options or {}).close()  # so that InvalidInput is raised before the run
        self.env = GameEnv("gymnasium", f"{__name__}:GymnasiumGame", keywords, max_turns, timeout)

    def tasks(self, train: int, test: int = 0, seed: int = 0, instruction: str = "") -> list[Task]:
        """Return tasks with a seed each. ``instruction`` opens each episode, by default with a list of the actions."""
        text = instruction or (f"Answer with one of: {', '.join(self.actions)}." if self.actions else "")
        return seeded_tasks(self.name, (Message.user(text),) if text else (), train, test, seed)


class GymnasiumGame:
    def __init__(self, name: str, actions: Sequence[str], options: Mapping[str, Any]) -> None:
        self._gymnasium = import_extra("gymnasium", extra="gymnasium")
        self._env = self._gymnasium.make(name, **options)
        self._numbers = {action.lower(): number for number, action in enumerate(actions)}
        space, spaces = self._env.action_space, self._gymnasium.spaces
        if not isinstance(space, spaces.Discrete | spaces.Text):
            do = "wrap it so that its actions are Discrete or Text"
            raise InvalidInput(f"actions of {name}", got=type(space).__name__, do=do)
        if actions and not (isinstance(space, spaces.Discrete) and space.n == len(actions)):
            raise InvalidInput(f"actions of {name}", got=f"{len(actions)} names", do=f"name the actions of {space}")

    def open(self, seed: int, attempt_seed: int) -> Observation:
        observation, _ = self._env.reset(seed=seed)
        return Observation(self._to_text(observation))

    def step(self, text: str) -> Observation:
        action = self._parse_action(text.strip())
        if action is None:
            expected = f"The actions are: {', '.join(self._numbers) or self._env.action_space}."
            return Observation(f"{text.strip()[:100]!r} is no action. {expected}", valid=False)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        end = "terminal" if terminated else "truncated" if truncated else None
        # mypy infers the type str for ``end``, but ``end`` has one of the values of ``Observation.end``
        return Observation(self._to_text(observation), float(reward), end)  # type: ignore[arg-type]

    def close(self) -> None:
        self._env.close()

    def _parse_action(self, text: str) -> Any:
        space = self._env.action_space
        if isinstance(space, self._gymnasium.spaces.Text):
            return text if space.contains(text) else None
        number = self._numbers.get(text.lower())
        if number is None and text.isdecimal():
            number = int(text)
        return None if number is None or not 0 <= number < space.n else int(space.start) + number

    def _to_text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return _mark_colors(str(self._env.render()))
        return json.dumps(observation, default=lambda array: array.tolist())  # for arrays and numbers of numpy


def _mark_colors(drawing: str) -> str:
    """Return a drawing for terminals as plain text. Each colored part is put in brackets.

    Example:
        >>> _mark_colors("SF\\x1b[41mF\\x1b[0mG")
        'SF[F]G'
    """
    return re.sub(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", r"[\1]", drawing)


Opponent = Callable[[str, random.Random], str]
"""A function (observation, rng) -> the opponent's action. It must draw random numbers only from ``rng``."""

RANDOM_MOVE = "agent_r1.envs.games:random_move"
MAX_OPPONENT_MOVES = 1000


class TextArena:
    """The environment and the tasks of a TextArena game (https://github.com/LeonGuertler/TextArena).

    After each action the policy sees only the new messages of the game. The reward is given at the end of the game, in
    most games 1 for a win, 0 for a draw, and -1 for a loss or for too many invalid actions.

    Args:
        game: the id of the game without the suffix of a wrapper: ``GuessTheNumber-v0``, not ``GuessTheNumber-v0-raw``.
        options: arguments of the game's constructor, e.g. ``{"max_number": 8}``.
        opponent: ``module:function`` of an :data:`Opponent`, for games with two players. The default is a random move
            among the moves that the game lists. The policy is player 0.
        timeout: the time limit of an action in seconds, including the actions of the opponent.
    """

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        *,
        opponent: str = RANDOM_MOVE,
        max_turns: int = 50,
        timeout: float = 20.0,
    ) -> None:
        known = import_extra("textarena", extra="textarena").envs.registration.ENV_REGISTRY
        if f"{game}-raw" not in known:
            hint = suggest(game, [name for name in known if name.endswith(("-v0", "-v1"))])
            raise InvalidInput("TextArena game", got=repr(game), do=hint or "use the id of one of its games")
        self.game = game
        keywords = {"game": game, "opponent": opponent, "options": dict(options or {})}
        self.env = GameEnv("textarena", f"{__name__}:TextArenaGame", keywords, max_turns, timeout)

    def tasks(self, train: int, test: int = 0, seed: int = 0) -> list[Task]:
        """Return tasks of the splits "train" and "test", each with its own seed of the game."""
        return seeded_tasks(self.game, (), train, test, seed)


class TextArenaGame:
    # Two games must not share a process, because TextArena's games draw from the global ``random``.

    def __init__(self, game: str, opponent: str, options: dict[str, Any]) -> None:
        self._textarena = import_extra("textarena", extra="textarena")
        self._env = self._make(game, options)
        self._num_players = self._find_num_players()
        self._opponent: Opponent = import_attribute(opponent)
        self._opponent_rng = random.Random()

    def _make(self, game: str, options: dict[str, Any]) -> Any:
        # The default wrappers of actions are kept. Those of observations would repeat the whole history in each turn.
        env = self._textarena.make(f"{game}-raw", **options)
        for wrapper in self._textarena.envs.registration.ENV_REGISTRY[game].default_wrappers or ():
            if issubclass(wrapper, self._textarena.ActionWrapper):
                env = wrapper(env)
        return env

    def _find_num_players(self) -> int:
        for players in (1, 2):
            try:
                self._env.reset(num_players=players, seed=0)
            except AssertionError:
                continue
            return players
        raise InvalidInput("TextArena game", got="one for more than two players", do="choose one for one or two")

    def open(self, seed: int, attempt_seed: int) -> Observation:
        self._opponent_rng = random.Random(attempt_seed)
        random.seed(seed)
        self._env.reset(num_players=self._num_players, seed=seed)
        return self._run_opponent(done=False)

    def step(self, text: str) -> Observation:
        done, _ = self._env.step(action=text)
        return self._run_opponent(done)

    def close(self) -> None:
        self._env.close()

    def _run_opponent(self, done: bool) -> Observation:
        for _ in range(MAX_OPPONENT_MOVES):
            if done:
                rewards, _ = self._env.close()
                return Observation("", float((rewards or {}).get(0, 0.0)), "terminal")
            player, events = self._env.get_observation()
            text = self._format(player, events)
            if player == 0:
                return Observation(text)
            done, _ = self._env.step(action=self._opponent(text, self._opponent_rng))
        raise RuntimeError(f"the opponent moved {MAX_OPPONENT_MOVES} times in a row")

    def _format(self, player: int, events: list[tuple[int, str, Any]]) -> str:
        # Each event is (sender, message, kind). The policy knows its own actions.
        action = self._textarena.ObservationType.PLAYER_ACTION
        names = self._env.state.role_mapping
        return "\n".join(
            f"{names[sender]}: {message}" if kind is action else message
            for sender, message, kind in events
            if not (kind is action and sender == player)
        )


def random_move(observation: str, rng: random.Random) -> str:
    """Return a random move, such as ``[3]``, of the last line with "available", "valid" or "legal", or raise
    ValueError.
    """
    lines = [line for line in observation.splitlines() if re.search("available|valid|legal", line, re.IGNORECASE)]
    moves = re.findall(r"\[[^\[\]]+\]", lines[-1]) if lines else []
    if not moves:
        raise ValueError("the game lists no moves to choose from: name an opponent that knows it")
    return rng.choice(moves)
