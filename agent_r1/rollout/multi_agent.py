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
"""The name of the reward that holds the score of a player."""


async def play_game(
    game: Game,
    agents: Sequence[Agent],
    task: Task,
    contexts: Sequence[RolloutContext],
    seed: int,
    seconds: float = GAME_SECONDS,
) -> tuple[Trajectory, ...]:
    """Play one match and return one trajectory for each player, in the order of ``agents``.

    ``contexts`` has one context for each player. One agent can be several players (self-play). If the game fails or
    takes more than ``seconds`` seconds, no trajectory has a reward or can be trained.
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
    try:
        (trajectory,) = await AgentLoop(agent, env).run(task, context)
        return trajectory
    finally:
        await env.close()


def _excuse_idle_player(env: PlayerEnv, trajectory: Trajectory) -> Trajectory:
    # a player that was asked nothing has a score and no turns
    if env.player.has_had_turn or trajectory.status != Status.ENVIRONMENT_FAILED:
        return trajectory
    return replace(trajectory, status=Status.COMPLETED, reason=None)


def _without_result(trajectory: Trajectory) -> Trajectory:
    if STATUS_POLICY[trajectory.status] != "train":
        return trajectory
    return replace(trajectory, status=Status.REWARD_FAILED, reason="the game had no result")
