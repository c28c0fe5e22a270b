"""Agents that play one match with each other: an episode of several policies, a trajectory for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agent_r1.core.environment import RolloutContext
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Status, Trajectory
from agent_r1.envs.multi_agent import GAME_SECONDS, Game, Match, Seat
from agent_r1.rollout.agent_loop import Agent

RETURN = "return"
"""The name of the reward that the game gives."""


async def play(
    game: Game,
    agents: Sequence[Agent],
    task: Task,
    contexts: Sequence[RolloutContext],
    seed: int,
    seconds: float = GAME_SECONDS,
) -> tuple[Trajectory, ...]:
    """One match; each agent's trajectory with what the game gave it, in the order of the agents.

    The same agent may sit on more than one seat (self-play). ``contexts`` name an attempt for each seat, and ``seed``
    fixes the game's chance. ``task.messages`` open every player's episode, before the game's first question to it.
    Where the game has no result, because it failed or took longer than ``seconds``, no trajectory is left to train:
    those that had ended well are REWARD_FAILED. A player whom the game never asked has its return and no turns, of
    which nothing can be learned.
    """
    match = Match(game, task, seed, len(agents), seconds)
    lives = (_seated(agent, seat, task, own) for agent, seat, own in zip(agents, match.seats, contexts, strict=True))
    returns, lived = await asyncio.gather(match.play(), asyncio.gather(*lives))
    if returns is None:
        return tuple(_unscored(trajectory) for trajectory in lived)
    ends = zip(match.seats, lived, returns, strict=True)
    return tuple(replace(_spared(seat, one), rewards={RETURN: earned}) for seat, one, earned in ends)


async def _seated(agent: Agent, seat: Seat, task: Task, context: RolloutContext) -> Trajectory:
    """The player's episode. The agent closes only what it opened; a player may have left before it was asked."""
    try:
        return await agent.live(seat, task, context)
    finally:
        await seat.close()


def _spared(seat: Seat, trajectory: Trajectory) -> Trajectory:
    """That the game could do without a player is no failure of the player's."""
    if seat.player.asked or trajectory.status != Status.ENVIRONMENT_FAILED:
        return trajectory
    return replace(trajectory, status=Status.COMPLETED, reason=None)


def _unscored(trajectory: Trajectory) -> Trajectory:
    if STATUS_POLICY[trajectory.status] != "train":
        return trajectory
    return replace(trajectory, status=Status.REWARD_FAILED, reason="the game had no result")
