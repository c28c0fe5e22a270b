"""TextArena's games (https://github.com/LeonGuertler/TextArena): alone, or against an opponent in the same process."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.packages import import_extra
from agent_r1.core.task import Task
from agent_r1.envs.adapters.fork_server import import_attribute
from agent_r1.envs.adapters.games import GameEnv, Observation

Opponent = Callable[[str, random.Random], str]
"""Gives an action for an observation; draws, if it does, from the generator it is given."""

RANDOM_MOVE = "agent_r1.envs.adapters.textarena:random_move"
MOVES_OF_OPPONENT = 1000
"""Actions of the opponent in a row; a game that goes on asking it is given up."""


class TextArena:
    """A game of TextArena as an environment and its tasks.

    The policy is told what is new since its last action, because a conversation keeps what was told before. The
    reward comes with the end: in most games 1 won, 0 drawn, -1 lost or an invalid action too many.

    Args:
        game: its id, e.g. ``GuessTheNumber-v0``, without the suffixes that choose a wrapper.
        options: what the game's constructor takes, e.g. ``{"max_number": 8}``.
        opponent: for two players, ``module:function`` of an :data:`Opponent`, found by import; the default takes
            any of the moves that the game lists. The policy is player 0.
        max_turns: actions per episode, where the game itself allows more.
        timeout: seconds an action may take, the opponent's included.

    Raises:
        InvalidInput: TextArena is not installed, or has no such game.
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
            near = difflib.get_close_matches(game, [name for name in known if name.endswith(("-v0", "-v1"))])
            raise InvalidInput("TextArena game", got=repr(game), do=f"choose one of {', '.join(near) or 'its ids'}")
        self.game = game
        keywords = {"game": game, "opponent": opponent, "options": dict(options or {})}
        self.env = GameEnv("textarena", f"{__name__}:TextArenaGame", keywords, max_turns, timeout)

    def tasks(self, train: int, test: int = 0, seed: int = 0) -> list[Task]:
        """Games of their own seeds, ``train`` of them in the split train and ``test`` others in the split test."""
        first = seed * 1_000_003
        return [
            Task(f"{self.game}/{first + n}", (), {"seed": first + n}, "train" if n < train else "test")
            for n in range(train + test)
        ]


class TextArenaGame:
    """One game, in the process that has it to itself: TextArena's games draw from the global ``random``."""

    def __init__(self, game: str, opponent: str, options: dict[str, Any]) -> None:
        self._textarena = import_extra("textarena", extra="textarena")
        self._env = self._wrapped(game, options)
        self._players = self._accepted_players()
        self._opponent: Opponent = import_attribute(opponent)
        self._draws = random.Random()

    def _wrapped(self, game: str, options: dict[str, Any]) -> Any:
        """The bare game, with those of its wrappers that mend actions: the others repeat all that was ever said."""
        env = self._textarena.make(f"{game}-raw", **options)
        for wrapper in self._textarena.envs.registration.ENV_REGISTRY[game].default_wrappers or ():
            if issubclass(wrapper, self._textarena.ActionWrapper):
                env = wrapper(env)
        return env

    def open(self, seed: int, luck: int) -> Observation:
        self._draws = random.Random(luck)
        random.seed(seed)
        self._env.reset(num_players=self._players, seed=seed)
        return self._until_asked(done=False)

    def step(self, text: str) -> Observation:
        done, _ = self._env.step(action=text)
        return self._until_asked(done)

    def close(self) -> None:
        self._env.close()

    def _accepted_players(self) -> int:
        """A game tells how many players it takes only by refusing others."""
        for players in (1, 2):
            try:
                self._env.reset(num_players=players, seed=0)
            except AssertionError:
                continue
            return players
        raise InvalidInput("TextArena game", got="one for more than two players", do="choose one for one or two")

    def _until_asked(self, done: bool) -> Observation:
        """Let the opponent move until it is our turn or the game is over."""
        for _ in range(MOVES_OF_OPPONENT):
            if done:
                rewards, _ = self._env.close()
                return Observation("", float((rewards or {}).get(0, 0.0)), "terminal")
            player, news = self._env.get_observation()
            text = self._told(player, news)
            if player == 0:
                return Observation(text)
            done, _ = self._env.step(action=self._opponent(text, self._draws))
        raise RuntimeError(f"the opponent moved {MOVES_OF_OPPONENT} times in a row")

    def _told(self, player: int, news: list[tuple[int, str, Any]]) -> str:
        """What a player is told, its own words left out, the other's behind their name."""
        spoken = self._textarena.ObservationType.PLAYER_ACTION
        names = self._env.state.role_mapping
        return "\n".join(
            f"{names[sender]}: {message}" if kind is spoken else message
            for sender, message, kind in news
            if not (kind is spoken and sender == player)
        )


def random_move(observation: str, draws: random.Random) -> str:
    """Any of the moves in brackets that the game lists as available, valid or legal."""
    lines = [line for line in observation.splitlines() if re.search("available|valid|legal", line, re.IGNORECASE)]
    moves = re.findall(r"\[[^\[\]]+\]", lines[-1]) if lines else []
    if not moves:
        raise ValueError("the game lists no moves to choose from: name an opponent that knows it")
    return draws.choice(moves)
