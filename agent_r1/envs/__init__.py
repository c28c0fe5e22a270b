"""Environments: the tool environment, a simulated user, games of several agents, and adapters."""

from agent_r1.envs.multi_agent import Game, Player, PlayerDropped
from agent_r1.envs.naive_rag import NaiveRag
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.envs.user_env import ModelUser, Reply, User, UserEnv

__all__ = ["Game", "ModelUser", "NaiveRag", "Player", "PlayerDropped", "Reply", "ToolEnv", "User", "UserEnv"]
