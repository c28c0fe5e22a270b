"""Other people's environments and tools. Each adapter imports its package when it is used, not when it is named."""

from agent_r1.env.adapters.games import episode_return
from agent_r1.env.adapters.gymnasium import Gymnasium
from agent_r1.env.adapters.mcp import HttpServer, StdioServer, mcp_tools
from agent_r1.env.adapters.openenv import OpenEnv
from agent_r1.env.adapters.reasoning_gym import reasoning_gym_score, reasoning_gym_tasks
from agent_r1.env.adapters.textarena import TextArena

__all__ = [
    "Gymnasium",
    "HttpServer",
    "OpenEnv",
    "StdioServer",
    "TextArena",
    "episode_return",
    "mcp_tools",
    "reasoning_gym_score",
    "reasoning_gym_tasks",
]
