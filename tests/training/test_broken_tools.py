"""A tool that hangs, floods, gives bytes, raises or dies costs an episode its turn, and not the run.

The tools are Python functions, code in the sandbox, and those of an MCP server; each breaks in the middle of training.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sandboxed import sandbox_or_skip

from agent_r1.config import Layer, resolve
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import STATUS_POLICY, Status, Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import Limits
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.wiki import found_page, search
from agent_r1.tools import function_tool as tools
from agent_r1.tools.function_tool import Resources, tool
from agent_r1.tools.mcp import mcp_tools
from agent_r1.tools.python_tool import python_tool
from agent_r1.tools.tool_errors import ToolErrorKind
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

SECONDS = 1.0
"""The time limit of a tool that hangs."""

SMALL: Mapping[str, Any] = {
    **{"steps": 2, "groups_per_step": 2, "group_size": 4, "evaluate_n": 1, "evaluate_every": 0, "pass_k": 0},
    **{"checkpoint_every": 0, "reward_weights.found": 1.0, "algorithm": "reinforce++"},
}
"""Searches that find a page are rewarded, so that every step teaches something."""

MCP_SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
Break = Callable[[Task, RolloutContext, Resources], Awaitable[ToolResult]]


@tool(timeout=SECONDS)
def hangs() -> str:
    """Hang in a thread."""
    time.sleep(2 * SECONDS)
    return "too late"


@tool
def floods() -> str:
    """Give a megabyte."""
    return "x" * 1_000_000


@tool
def binary() -> Any:
    """Give bytes."""
    return b"\xff\xfe\x00"


@tool
def raises() -> str:
    """Raise."""
    raise ValueError("no such page")


@tool
def dies() -> str:
    """Ask the interpreter to end."""
    sys.exit(3)


def functions() -> dict[str, Break]:
    return {made.spec.name: calls(made, {}) for made in (hangs, floods, binary, raises, dies)}


CODE = {
    "hangs": "while True: pass",
    "floods": "while True: print('x' * 10_000)",
    "binary": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "raises": "raise ValueError('no such page')",
    "dies": "import os; os._exit(1)",
}


def sandboxed() -> dict[str, Break]:
    python = python_tool(sandbox_or_skip(Limits(seconds=SECONDS, memory=2**28, disk=2**20, output=1000)))
    return {kind: calls(python, {"code": code}) for kind, code in CODE.items()}


def served() -> dict[str, Break]:
    pytest.importorskip("mcp", reason="mcp is not installed (extra mcp)")
    names = {"hangs": "hangs", "floods": "floods", "picture": "binary", "raises": "raises", "dies": "dies"}
    server = f"{sys.executable} {MCP_SERVER}"  # only calls that hang have a short time limit
    made = [*mcp_tools(server, timeout=SECONDS, only=["hangs"]), *mcp_tools(server, only=[*names][1:])]
    return {names[one.spec.name]: calls(one, {}) for one in made}


def calls(made: tools.Tool, arguments: Mapping[str, Any]) -> Break:
    """What calling a broken tool gives, as an environment calls it."""
    return lambda task, context, resources: made.run(arguments, task, context, 60.0, resources)


TELLS: Mapping[str, Callable[[ToolResult], bool]] = {
    "hangs": lambda result: result.error == ToolErrorKind.TIMED_OUT and result.seconds < 500,
    "floods": lambda result: sum(len(part.text) for part in result.parts) < 3000,
    "binary": lambda result: True,  # it may be told as text, as a picture, or as what cannot be shown
    "raises": lambda result: result.error == ToolErrorKind.RAISED,
    "dies": lambda result: result.error == ToolErrorKind.RAISED,
}
"""What the agent is told of each."""


EVERY, BREAKS = 2, 7
"""Every second call of training breaks, and seven in all: each kind once, and a server that hung or died again."""


def breaking(breaks: Mapping[str, Break]) -> TaskSet:
    """A task set whose search breaks ``BREAKS`` times, in one of ``EVERY`` calls of training; the data says how."""
    numbers, kinds = itertools.count(), itertools.islice(itertools.cycle(breaks), BREAKS)

    @tool(name="search")
    async def either(query: str, task: Task, context: RolloutContext, resources: Resources) -> Any:
        """Find a page.

        Args:
            query: what to find
        """
        kind = None if task.split != "train" or next(numbers) % EVERY else next(kinds, None)
        if kind is None:
            return await search.function(query=query, task=task)
        return replace(await breaks[kind](task, context, resources), data=kind)

    wiki = build("tinywiki", None, None, 0)
    env = ToolEnv([either], max_turns=5, call_rewards=found_page)
    return replace(wiki, env=env, baselines={}, evaluation=("style-a",))


@dataclass(frozen=True)
class Left:
    """What a run left behind."""

    trajectories: tuple[Trajectory, ...]
    failed_calls: float
    violations: tuple[str, ...]
    completed: bool


def trained(taskset: TaskSet, folder: Path) -> Left:
    torch.set_num_threads(1)
    settings = resolve(TrainConfig, [Layer("test", {**SMALL, "run": str(folder)}), Layer("recipe", taskset.recipe)])
    train(settings, taskset, SilentProgress())
    with closing(RunReader(folder)) as reader:
        failed = sum(step.values["failed_calls"] for step in reader.metrics())
        return Left(tuple(reader.trajectories()), failed, tuple(verify(folder).violations), reader.is_complete())


@pytest.mark.parametrize("source", [functions, sandboxed, served], ids=lambda source: source.__name__)
def test_a_broken_tool_costs_a_turn_and_not_the_run(source: Callable[[], dict[str, Break]], tmp_path: Path) -> None:
    left = trained(breaking(source()), tmp_path / "run")
    assert left.completed and left.violations == ()
    assert [lived.reason for lived in left.trajectories if STATUS_POLICY[lived.status] != "train"] == []
    told = [result for lived in left.trajectories for turn in lived.turns for result in turn.results]
    broken = [result for result in told if result.data in TELLS]
    assert {result.data for result in broken} == set(TELLS), "each kind has happened"
    assert [result for result in broken if not TELLS[result.data](result)] == []
    assert left.failed_calls == sum(not result.ok for result in broken) > 0


def test_a_tool_that_is_not_held_costs_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unheld(work: Callable[[], Any], timeout: float) -> tools.CallOutcome:
        return tools.ReturnValue(await work())

    async def raising(task: Task, context: RolloutContext, resources: Resources) -> ToolResult:
        raise ValueError("no such page")

    monkeypatch.setattr(tools, "run_with_timeout", unheld)
    left = trained(breaking({"raises": raising}), tmp_path / "run")
    lost = [lived for lived in left.trajectories if lived.status == Status.ENVIRONMENT_FAILED]
    assert lost and all("no such page" in str(lived.reason) for lived in lost)
