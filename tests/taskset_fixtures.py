"""Fixtures for the tests of task sets: a sandbox, and whole episodes of a scripted agent."""

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
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits as CollectorLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.sandbox import Sandbox

Reply = Callable[[str], str]


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return sandbox_or_skip(Limits(seconds=5))


def format_call(name: str, code: str) -> str:
    """Return a tool call with one argument, code, in the Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.fixture(scope="session")
def call() -> Callable[[str, str], str]:
    return format_call


@pytest.fixture(scope="session")
def run_attempts() -> Callable[..., list[Trajectory]]:
    def run(taskset: TaskSet, tasks: Sequence[Task], script: Reply | list[str], size: int = 1) -> list[Trajectory]:
        renderer = TemplateRenderer(hermes_tokenizer())
        reply = script if callable(script) else _by_turn(script)
        agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=10**6), 10**6)

        async def collect() -> list[Trajectory]:
            rollout, limits = AgentLoop(agent, taskset.env), CollectorLimits(retries=0)
            collector = Collector(rollout, taskset.scorers, NullRecorder(), "test", limits)
            orders = (GroupRequest(serial, task, size) for serial, task in enumerate(tasks))
            async with aclosing(collector.collect(orders)) as groups:
                return [trajectory async for group in groups for trajectory in group.trajectories]

        return asyncio.run(collect())

    return run


def _by_turn(script: list[str]) -> Reply:
    return lambda text: script[text.count("<|im_start|>assistant") - 1]


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        return path

    return write
