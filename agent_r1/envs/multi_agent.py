"""A game of several agents as plain async Python: the game asks its players, and each player lives an episode.

    async def higher(players, task, draws):
        first, second = [int(await player.ask("Name a number from 1 to 9.")) for player in players]
        return (1.0, 0.0) if first > second else (0.0, 1.0)

Each player has a seat, which is an environment like any other: what the game tells a player is an observation, what the
player says is its action. So the agent loop, masks and credit are those of one agent, and each side has a trajectory.
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
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.tools.execution import CallFailure, CallOutcome, CallTimeout, ReturnValue, run_with_timeout

GAME_SECONDS = 3600.0
"""How long a game may take where nothing else is said, the thinking of its players included."""


class PlayerDropped(AgentR1Error):
    """A player was asked whose attempt is over: its engine failed, or its tokens ran out."""


@dataclass(frozen=True, slots=True)
class GameOver:
    """The game is over; ``failure`` says why it has no result."""

    failure: str | None = None


@dataclass(slots=True, eq=False)
class Player:
    """A player, as the game meets it. ``number`` counts from 0; ``asked`` says that it ever was."""

    number: int
    asked: bool = False
    news: asyncio.Queue[str | GameOver] = field(default_factory=asyncio.Queue)
    said: asyncio.Queue[Action | PlayerDropped] = field(default_factory=asyncio.Queue)
    pending: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        """Something the player hears with what it is asked next."""
        self.pending.append(text)

    async def ask(self, text: str) -> str:
        """What the player says to this. Raises PlayerDropped where it says nothing any more."""
        self.asked = True
        self.news.put_nowait("\n".join((*self.pending, text)))
        self.pending.clear()
        said = await self.said.get()
        if isinstance(said, PlayerDropped):
            self.said.put_nowait(said)  # whoever asks again hears it again
            raise said
        return said.message.text


Game = Callable[[Sequence[Player], Task, random.Random], Awaitable[Sequence[float]]]
"""Plays the task and gives each player its return. All chance comes from the generator."""


class Match:
    """One play of a game. ``seats`` are the environments of its players, each to be opened once, and to be closed.

    A game that raises, takes longer than ``seconds``, or gives anything but a finite number for each player, fails the
    episodes of all.
    """

    def __init__(self, game: Game, task: Task, seed: int, players: int, seconds: float = GAME_SECONDS) -> None:
        self._game, self._task, self._seed, self._seconds = game, task, seed, seconds
        self._players = tuple(Player(number) for number in range(players))
        self.seats = tuple(PlayerEnv(player) for player in self._players)

    async def play(self) -> tuple[float, ...] | None:
        """Play to the end; each player's return, None where the game failed. Its seats have to be lived meanwhile."""
        result: tuple[float, ...] | GameOver = GameOver("it was cancelled")
        try:
            result = _result(await run_with_timeout(self._returns, self._seconds))
        finally:
            over = result if isinstance(result, GameOver) else GameOver()
            for player in self._players:
                player.news.put_nowait(over)
        return None if isinstance(result, GameOver) else result

    async def _returns(self) -> tuple[float, ...]:
        given = await self._game(self._players, self._task, random.Random(self._seed))
        returns = tuple(map(float, given))
        if len(returns) != len(self._players) or not all(map(math.isfinite, returns)):
            raise AgentR1Error(f"it gave the returns {returns} for {len(self._players)} players")
        return returns


def _result(outcome: CallOutcome) -> tuple[float, ...] | GameOver:
    """The returns of a game, or why it has none."""
    match outcome:
        case CallFailure(reason=reason):
            return GameOver(reason)
        case CallTimeout(seconds=seconds):
            return GameOver(f"it took longer than {seconds:g} seconds")
        case ReturnValue(value=returns):
            return cast(tuple[float, ...], returns)


@dataclass(slots=True, eq=False)
class PlayerEnv:
    """A player's place in one match: an environment, and its one episode."""

    player: Player
    tools: tuple[ToolSpec, ...] = ()
    start: tuple[Message, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> PlayerEnv:
        """Waits until the player is asked for the first time."""
        first = await self._heard()
        if not first:
            raise AgentR1Error(f"the game ended before player {self.player.number} was asked")
        self.start = (*task.messages, *first)
        return self

    async def step(self, action: Action) -> Transition:
        """Waits until the player is asked again, or the game is over."""
        self.player.said.put_nowait(action)
        heard = await self._heard()
        return Transition(heard, end=None if heard else "terminal")

    async def close(self) -> None:
        """The game may go on without the player, if it can."""
        self.player.said.put_nowait(PlayerDropped(f"player {self.player.number} left"))

    async def _heard(self) -> tuple[Message, ...]:
        """What the player is asked; nothing where the game is over."""
        news = await self.player.news.get()
        if isinstance(news, str):
            return (Message.user(news),)
        if news.failure is not None:
            raise AgentR1Error(f"the game failed: {news.failure}")
        return ()
