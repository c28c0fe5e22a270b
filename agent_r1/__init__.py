"""Train LLM agents end to end by reinforcement learning.

    from agent_r1 import ToolEnv, Task, Message, exact_match, tool, train

Importing this loads neither torch nor a model: ``train`` does, when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs import ToolEnv
from agent_r1.rewards import exact_match, f1, final_answer, gated_exact_match, sub_match
from agent_r1.tools import tool

if TYPE_CHECKING:
    from agent_r1.training.api import train as train

__all__ = [
    "AgentR1Error",
    "InvalidInput",
    "Message",
    "Task",
    "ToolEnv",
    "ToolResult",
    "Trajectory",
    "exact_match",
    "f1",
    "final_answer",
    "gated_exact_match",
    "sub_match",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("agent_r1.training.api").train
    raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
