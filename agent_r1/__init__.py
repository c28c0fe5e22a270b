"""Train LLM agents end to end by reinforcement learning.

    from agent_r1 import Task, ToolEnv, Trainer, exact_match, tool

Every public name is imported from this package. A name is loaded at its first use, so ``import agent_r1`` loads
neither torch nor a server.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # checked before the imports below, because they need fcntl
    _LINE = "Agent-R1 runs on Linux and macOS; on Windows, use it in the Windows Subsystem for Linux (WSL)"
    if os.path.basename(sys.argv[0]).startswith("agent-r1"):
        sys.exit(f"agent-r1: {_LINE}")  # the command prints one line without a traceback
    raise ImportError(_LINE)

if TYPE_CHECKING:
    from agent_r1.algorithms.algorithm import Algorithm as Algorithm
    from agent_r1.algorithms.policy_losses import Clip as Clip, PolicyLoss as PolicyLoss
    from agent_r1.algorithms.presets import ALGORITHMS as ALGORITHMS
    from agent_r1.algorithms.types import Advantage as Advantage
    from agent_r1.core.environment import (
        Env as Env,
        Episode as Episode,
        RolloutContext as RolloutContext,
        Transition as Transition,
    )
    from agent_r1.core.errors import AgentR1Error as AgentR1Error, InvalidInput as InvalidInput
    from agent_r1.core.messages import (
        Action as Action,
        Image as Image,
        Message as Message,
        Text as Text,
        ToolCall as ToolCall,
        ToolResult as ToolResult,
        ToolSpec as ToolSpec,
    )
    from agent_r1.core.task import Task as Task
    from agent_r1.core.taskset import (
        ReferenceSolution as ReferenceSolution,
        ReferenceSolutions as ReferenceSolutions,
        TaskSet as TaskSet,
        script as script,
        tool_call as tool_call,
    )
    from agent_r1.core.trajectory import (
        AttemptId as AttemptId,
        Group as Group,
        Scorer as Scorer,
        Status as Status,
        Trajectory as Trajectory,
        Turn as Turn,
        Unscored as Unscored,
    )
    from agent_r1.envs.games import Gymnasium as Gymnasium, TextArena as TextArena, episode_return as episode_return
    from agent_r1.envs.multi_agent import Game as Game, Player as Player, PlayerDropped as PlayerDropped
    from agent_r1.envs.openenv import OpenEnv as OpenEnv
    from agent_r1.envs.reasoning_gym import (
        reasoning_gym_score as reasoning_gym_score,
        reasoning_gym_tasks as reasoning_gym_tasks,
    )
    from agent_r1.envs.tool_env import NaiveRag as NaiveRag, ToolEnv as ToolEnv
    from agent_r1.envs.user_env import ModelUser as ModelUser, Reply as Reply, User as User, UserEnv as UserEnv
    from agent_r1.rewards.scoring import (
        exact_match as exact_match,
        f1 as f1,
        final_answer as final_answer,
        final_text as final_text,
        gated_exact_match as gated_exact_match,
        gold_answers as gold_answers,
        sub_match as sub_match,
    )
    from agent_r1.sandbox.config import Limits as Limits, SandboxConfig as SandboxConfig
    from agent_r1.sandbox.sandbox import Sandbox as Sandbox
    from agent_r1.store.folder import run_folder as run_folder
    from agent_r1.store.frames import RunData as RunData, load_run as load_run
    from agent_r1.store.reader import AttemptFilter as AttemptFilter, RunReader as RunReader
    from agent_r1.tools.function_tool import Opener as Opener, Resources as Resources, Tool as Tool, tool as tool
    from agent_r1.tools.mcp import mcp_tools as mcp_tools
    from agent_r1.tools.python_tool import python_tool as python_tool
    from agent_r1.training.api import Trainer as Trainer, finetune as finetune, resume as resume, train as train
    from agent_r1.training.task_files import tasks_from_jsonl as tasks_from_jsonl

_MODULES = {
    "algorithms.algorithm": "Algorithm",
    "algorithms.types": "Advantage",
    "algorithms.policy_losses": "Clip PolicyLoss",
    "algorithms.presets": "ALGORITHMS",
    "core.environment": "Env Episode RolloutContext Transition",
    "core.errors": "AgentR1Error InvalidInput",
    "core.messages": "Action Image Message Text ToolCall ToolResult ToolSpec",
    "core.task": "Task",
    "core.taskset": "ReferenceSolution ReferenceSolutions TaskSet script tool_call",
    "core.trajectory": "AttemptId Group Scorer Status Trajectory Turn Unscored",
    "envs.games": "Gymnasium TextArena episode_return",
    "envs.multi_agent": "Game Player PlayerDropped",
    "envs.openenv": "OpenEnv",
    "envs.reasoning_gym": "reasoning_gym_score reasoning_gym_tasks",
    "envs.tool_env": "NaiveRag ToolEnv",
    "envs.user_env": "ModelUser Reply User UserEnv",
    "rewards.scoring": "exact_match f1 final_answer final_text gated_exact_match gold_answers sub_match",
    "sandbox.config": "Limits SandboxConfig",
    "sandbox.sandbox": "Sandbox",
    "store.folder": "run_folder",
    "store.frames": "RunData load_run",
    "store.reader": "AttemptFilter RunReader",
    "tools.function_tool": "Opener Resources Tool tool",
    "tools.mcp": "mcp_tools",
    "tools.python_tool": "python_tool",
    "training.api": "Trainer finetune resume train",
    "training.task_files": "tasks_from_jsonl",
}
"""The public names of each module."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def _module_with(name: str) -> str | None:
    # The first module that defines a public class or function of this name; None for names of modules.
    root = Path(__file__).parent
    if name.startswith("_") or (root / name).exists() or (root / f"{name}.py").exists():
        return None
    definition = re.compile(rf"^(class|def|async def) {re.escape(name)}\b".encode(), re.MULTILINE)
    found = next((file for file in sorted(root.rglob("*.py")) if definition.search(file.read_bytes())), None)
    return None if found is None else ".".join(found.relative_to(root.parent).with_suffix("").parts)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml is the only file that states it
        from importlib.metadata import version  # takes longer to import than this package

        return version("agent-r1")
    if name not in _MODULE_OF:
        if (module := _module_with(name)) is not None:  # from agent_r1 import NAME would hide an AttributeError's text
            raise ImportError(f"agent_r1 has no {name}: from {module} import {name}", name=__name__)
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    value = vars(import_module(f"agent_r1.{_MODULE_OF[name]}"))[name]
    globals()[name] = value
    return value
