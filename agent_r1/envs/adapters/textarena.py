"""Games of TextArena (https://github.com/LeonGuertler/TextArena), for one player or against an opponent."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput, import_extra, suggest
from agent_r1.core.task import Task
from agent_r1.envs.adapters.fork_server import import_attribute
from agent_r1.envs.adapters.games import GameEnv, Observation, seeded_tasks

Opponent = Callable[[str, random.Random], str]
"""A function that returns the opponent's action. Its arguments are (observation, rng).

The function must draw random numbers only from ``rng``.
"""

RANDOM_MOVE = "agent_r1.envs.adapters.textarena:random_move"
MAX_OPPONENT_MOVES = 1000


class TextArena:
    """The environment and the tasks of a TextArena game.

    After each action the policy sees only the new messages of the game. The reward is given at the end of the game, in
    most games 1 for a win, 0 for a draw, and -1 for a loss or for too many invalid actions.

    Args:
        game: the id of the game without the suffix of a wrapper: ``GuessTheNumber-v0``, not ``GuessTheNumber-v0-raw``.
        options: arguments of the game's constructor, e.g. ``{"max_number": 8}``.
        opponent: ``module:function`` of an :data:`Opponent`, for games with two players. The default is a random move
            among the moves that the game lists. The policy is player 0.
        timeout: the time limit of an action in seconds, including the actions of the opponent.

    Raises:
        InvalidInput: if TextArena is not installed, or the game does not exist.
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
        """Return tasks of two splits. ``train`` and ``test`` are the numbers of tasks in the splits "train" and "test".

        Each task has its own seed of the game. Different values of ``seed`` give different tasks.
        """
        return seeded_tasks(self.game, (), train, test, seed)


class TextArenaGame:
    """A TextArena game as a :class:`Game`.

    Two games must not share a process, because TextArena's games draw from the global ``random``.
    """

    def __init__(self, game: str, opponent: str, options: dict[str, Any]) -> None:
        self._textarena = import_extra("textarena", extra="textarena")
        self._env = self._make(game, options)
        self._num_players = self._find_num_players()
        self._opponent: Opponent = import_attribute(opponent)
        self._opponent_rng = random.Random()

    def _make(self, game: str, options: dict[str, Any]) -> Any:
        """Return the game with its default wrappers for actions, but without its default wrappers for observations."""
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
        """Let the opponent act until it is the policy's turn or the game ends. Return the policy's observation."""
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
        """Return one text with all messages in ``events``, without the actions of ``player``.

        Each event is (sender, message, kind). ``player`` is the player that receives the messages.
        """
        action = self._textarena.ObservationType.PLAYER_ACTION
        names = self._env.state.role_mapping
        return "\n".join(
            f"{names[sender]}: {message}" if kind is action else message
            for sender, message, kind in events
            if not (kind is action and sender == player)
        )


def random_move(observation: str, rng: random.Random) -> str:
    """Return a random move among the moves that the game lists, with its brackets, such as ``[3]``.

    The moves are in the last line that contains "available", "valid" or "legal".

    Raises:
        ValueError: if the observation contains no such moves.
    """
    lines = [line for line in observation.splitlines() if re.search("available|valid|legal", line, re.IGNORECASE)]
    moves = re.findall(r"\[[^\[\]]+\]", lines[-1]) if lines else []
    if not moves:
        raise ValueError("the game lists no moves to choose from: name an opponent that knows it")
    return rng.choice(moves)
