"""Games between several agents. A match gives one trajectory for each player."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from agent_r1.core.environment import RolloutContext
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Status, Trajectory
from agent_r1.envs.multi_agent import GAME_SECONDS, Game, Match, PlayerEnv
from agent_r1.rollout.agent_loop import Agent, AgentLoop

RETURN = "return"
"""The name of the reward that holds the score of a player in the game."""


async def play_game(
    game: Game,
    agents: Sequence[Agent],
    task: Task,
    contexts: Sequence[RolloutContext],
    seed: int,
    seconds: float = GAME_SECONDS,
) -> tuple[Trajectory, ...]:
    """Play one match and return one trajectory for each player, in the order of ``agents``.

    Each trajectory has a reward with the name ``return``: the score that the game gives to the player. The episode of
    each player begins with ``task.messages``, followed by the first question of the game to the player. A player
    that gets no question has a score but no turns.

    The game has no result if it fails or takes more than ``seconds``. Then no trajectory has a reward, and each
    trajectory whose status allows training gets the status REWARD_FAILED.

    Args:
        game: asks the players questions, and returns their scores.
        agents: the players. One agent can be several players (self-play).
        task: the task that the game and all players get.
        contexts: one context for each player, each with an attempt id of its own.
        seed: the seed of the random numbers of the game.
        seconds: the time limit of the game, in seconds.
    """
    match = Match(game, task, seed, len(agents), seconds)
    episodes = (
        _play_episode(agent, env, task, context)
        for agent, env, context in zip(agents, match.players, contexts, strict=True)
    )
    returns, trajectories = await asyncio.gather(match.play(), asyncio.gather(*episodes))
    if returns is None:
        return tuple(_without_result(trajectory) for trajectory in trajectories)
    return tuple(
        replace(_excuse_idle_player(env, trajectory), rewards={RETURN: earned})
        for env, trajectory, earned in zip(match.players, trajectories, returns, strict=True)
    )


async def _play_episode(agent: Agent, env: PlayerEnv, task: Task, context: RolloutContext) -> Trajectory:
    """Play the episode of one player and return its trajectory.

    When the episode ends or fails, report to the game that the player has left.
    """
    try:
        (trajectory,) = await AgentLoop(agent, env).run(task, context)
        return trajectory
    finally:
        await env.close()


def _excuse_idle_player(env: PlayerEnv, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory. If it failed only because the player got no question, its status becomes COMPLETED."""
    if env.player.has_had_turn or trajectory.status != Status.ENVIRONMENT_FAILED:
        return trajectory
    return replace(trajectory, status=Status.COMPLETED, reason=None)


def _without_result(trajectory: Trajectory) -> Trajectory:
    if STATUS_POLICY[trajectory.status] != "train":
        return trajectory
    return replace(trajectory, status=Status.REWARD_FAILED, reason="the game had no result")
