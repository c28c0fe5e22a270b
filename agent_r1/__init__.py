"""Train LLM agents end to end by reinforcement learning.

    from agent_r1 import Task, ToolEnv, Trainer, exact_match, tool, train

The import of this package loads neither torch nor a model. The first use of ``train`` or ``Trainer`` loads torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # checked before the imports below, because they need fcntl
    _LINE = "Agent-R1 runs on Linux and macOS; on Windows, use it in the Windows Subsystem for Linux (WSL)"
    if os.path.basename(sys.argv[0]).startswith("agent-r1"):
        sys.exit(f"agent-r1: {_LINE}")  # the command prints one line without a traceback
    raise ImportError(_LINE)

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Image, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs import ToolEnv
from agent_r1.rewards import exact_match, f1, final_answer, gated_exact_match, sub_match
from agent_r1.tools import tool

if TYPE_CHECKING:
    from agent_r1.training.api import Trainer as Trainer
    from agent_r1.training.api import train as train

__all__ = [
    "AgentR1Error",
    "Image",
    "InvalidInput",
    "Message",
    "Task",
    "TaskSet",
    "Text",
    "ToolEnv",
    "ToolResult",
    "Trainer",
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
    if name in ("Trainer", "train"):  # the module of these names loads torch
        api = import_module("agent_r1.training.api")
        return api.train if name == "train" else api.Trainer
    raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
