"""Agents that play one match with each other: an episode of several policies, a trajectory for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agent_r1.core.task import Task
from agent_r1.core.trajectory import TREATMENT, Status, Trajectory
from agent_r1.core.world import Context
from agent_r1.env.match import Game, Match
from agent_r1.rollout.agent import Agent

RETURN = "return"
"""The name of the reward that the game gives."""


async def play(
    game: Game, agents: Sequence[Agent], task: Task, contexts: Sequence[Context], seed: int
) -> tuple[Trajectory, ...]:
    """One match; each agent's trajectory with what the game gave it, in the order of the agents.

    The same agent may sit on more than one seat (self-play). ``contexts`` name an attempt for each seat, and ``seed``
    fixes the game's chance. ``task.messages`` open every player's episode, before the game's first question to it.
    Where the game has no result, no trajectory is left to train: those that had ended well are REWARD_FAILED.
    """
    match = Match(game, task, seed, len(agents))
    lives = (agent.live(seat, task, own) for agent, seat, own in zip(agents, match.seats, contexts, strict=True))
    returns, lived = await asyncio.gather(match.play(), asyncio.gather(*lives))
    if returns is None:
        return tuple(_unscored(trajectory) for trajectory in lived)
    return tuple(replace(one, rewards={RETURN: earned}) for one, earned in zip(lived, returns, strict=True))


def _unscored(trajectory: Trajectory) -> Trajectory:
    if TREATMENT[trajectory.status] != "train":
        return trajectory
    return replace(trajectory, status=Status.REWARD_FAILED, reason="the game had no result")
