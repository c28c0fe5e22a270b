"""Environments: the tool environment, a simulated user, games of several agents, and adapters."""

from agent_r1.envs.naive_rag import NaiveRag
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.envs.user_env import ModelUser, Reply, User, UserEnv

__all__ = ["ModelUser", "NaiveRag", "Reply", "ToolEnv", "User", "UserEnv"]
