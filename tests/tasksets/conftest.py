"""What the tests of worlds need: a sandbox, and whole episodes of an agent that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from sandboxed import sandbox_or_skip
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.inference import SamplingParams
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest
from agent_r1.rollout.collector import RolloutLimits as CollectorLimits
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.sandbox import Limits, Sandbox
from agent_r1.training.null_recorder import NullRecorder, no_gate

Reply = Callable[[str], str]


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The default level."""
    return sandbox_or_skip(Limits(seconds=5))


def calling(name: str, code: str) -> str:
    """A tool call with one argument, code, as the Hermes format words it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.fixture(scope="session")
def call() -> Callable[[str, str], str]:
    return calling


@pytest.fixture(scope="session")
def live() -> Callable[..., list[Trajectory]]:
    """``live(world, tasks, script, size)``: scored attempts, ``size`` at each task, through tokens, tools and scorers.

    ``script`` gives what is said in each turn; it is told the text so far. Or it is a list with one text per turn.
    """

    def living(taskset: TaskSet, tasks: Sequence[Task], script: Reply | list[str], size: int = 1) -> list[Trajectory]:
        renderer = TemplateRenderer(hermes_tokenizer())
        reply = script if callable(script) else _by_turn(script)
        agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=10**6), 10**6)

        async def collect() -> list[Trajectory]:
            rollout, limits = AgentLoop(agent, taskset.env), CollectorLimits(retries=0)
            collector = Collector(rollout, taskset.scorers, NullRecorder(), "test", limits)
            orders = (GroupRequest(serial, task, size) for serial, task in enumerate(tasks))
            async with aclosing(collector.collect(orders, no_gate)) as groups:
                return [trajectory async for group in groups for trajectory in group.trajectories]

        return asyncio.run(collect())

    return living


def _by_turn(script: list[str]) -> Reply:
    return lambda text: script[text.count("<|im_start|>assistant") - 1]


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """``rows_file(row, row)`` is a JSONL file of them."""

    def write(*rows: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return write
