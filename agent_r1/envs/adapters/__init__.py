"""Adapters for environments of other projects. An adapter imports its package when the adapter is first used."""

from agent_r1.envs.adapters.games import episode_return
from agent_r1.envs.adapters.gymnasium import Gymnasium
from agent_r1.envs.adapters.openenv import OpenEnv
from agent_r1.envs.adapters.reasoning_gym import reasoning_gym_score, reasoning_gym_tasks
from agent_r1.envs.adapters.textarena import TextArena

__all__ = ["Gymnasium", "OpenEnv", "TextArena", "episode_return", "reasoning_gym_score", "reasoning_gym_tasks"]
