"""Games of several agents, written as async Python functions. A game asks its players and returns their scores.

    async def higher(players, task, rng):
        first, second = [int(await player.ask("Name a number from 1 to 9.")) for player in players]
        return (1.0, 0.0) if first > second else (0.0, 1.0)

Each player has an environment and a trajectory of its own. The questions of the game are the observations, and the
answers of the player are the actions.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.tools.execution import CallFailure, CallTimeout, ReturnValue, run_with_timeout

GAME_SECONDS = 3600.0
"""The default time limit of a game in seconds, including the time in which the players generate."""


class PlayerDropped(AgentR1Error):
    """Raised if a game asks a player whose attempt has ended, for example because the generation failed."""


@dataclass(frozen=True, slots=True)
class GameOver:
    """The message that a game has ended. ``failure`` is None if the game has a result."""

    failure: str | None = None


@dataclass(slots=True, eq=False)
class Player:
    """A player in a game. The game calls ``tell`` and ``ask``."""

    number: int  # from 0
    has_had_turn: bool = False
    questions: asyncio.Queue[str | GameOver] = field(default_factory=asyncio.Queue)  # read by the player's environment
    # filled by the player's environment, at last with PlayerDropped when the player leaves the game
    answers: asyncio.Queue[Action | PlayerDropped] = field(default_factory=asyncio.Queue)
    announcements: list[str] = field(default_factory=list)  # told since the last question

    def tell(self, text: str) -> None:
        """Store a text, which the player will see in front of the next question."""
        self.announcements.append(text)

    async def ask(self, text: str) -> str:
        """Ask the player, and return the answer. Raise PlayerDropped if the player's attempt has ended."""
        self.has_had_turn = True
        self.questions.put_nowait("\n".join((*self.announcements, text)))
        self.announcements.clear()
        answer = await self.answers.get()
        if isinstance(answer, PlayerDropped):
            self.answers.put_nowait(answer)  # the next question fails too
            raise answer
        return answer.message.text


Game = Callable[[Sequence[Player], Task, random.Random], Awaitable[Sequence[float]]]
"""A function (players, task, rng) that plays one match and returns the score of each player.

It must draw random numbers only from ``rng``."""


class Match:
    """One match of a game. The caller must open and close each of the environments ``players`` once.

    If the game raises an exception, takes more than ``seconds``, or does not return one finite score per player, the
    episodes of all players fail. ``seed`` determines the game's random numbers.
    """

    def __init__(self, game: Game, task: Task, seed: int, players: int, seconds: float = GAME_SECONDS) -> None:
        self._game, self._task, self._seed, self._seconds = game, task, seed, seconds
        self.players = tuple(PlayerEnv(Player(number)) for number in range(players))

    async def play(self) -> tuple[float, ...] | None:
        """Play the match, and return the score of each player, or None if the game failed."""
        returns, over = None, GameOver("it was cancelled")
        try:
            outcome = await run_with_timeout(self._returns, self._seconds)
            match outcome:
                case ReturnValue(value=value):
                    returns, over = cast(tuple[float, ...], value), GameOver()
                case CallFailure(reason=reason):
                    over = GameOver(reason)
                case CallTimeout(seconds=seconds):
                    over = GameOver(f"it took longer than {seconds:g} seconds")
        finally:
            for env in self.players:
                env.player.questions.put_nowait(over)
        return returns

    async def _returns(self) -> tuple[float, ...]:
        given = await self._game([env.player for env in self.players], self._task, random.Random(self._seed))
        returns = tuple(map(float, given))
        if len(returns) != len(self.players) or not all(map(math.isfinite, returns)):
            raise AgentR1Error(f"it returned the scores {returns} for {len(self.players)} players")
        return returns


@dataclass(slots=True, eq=False)
class PlayerEnv:
    """The environment of one player in one match. The object is also the player's episode."""

    player: Player
    tools: tuple[ToolSpec, ...] = ()
    start: tuple[Message, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> PlayerEnv:
        """Wait for the first question to the player. Raise AgentR1Error if the game ends before it."""
        question = await self._next_question()
        if not question:
            raise AgentR1Error(f"the game ended before player {self.player.number} had a turn")
        self.start = (*task.messages, *question)
        return self

    async def step(self, action: Action) -> Transition:
        self.player.answers.put_nowait(action)
        question = await self._next_question()
        return Transition(question, end=None if question else "terminal")

    async def close(self) -> None:
        self.player.answers.put_nowait(PlayerDropped(f"player {self.player.number} left"))

    async def _next_question(self) -> tuple[Message, ...]:
        # () if the game has ended
        question = await self.player.questions.get()
        if isinstance(question, str):
            return (Message.user(question),)
        if question.failure is not None:
            raise AgentR1Error(f"the game failed: {question.failure}")
        return ()
