"""An environment that is a different one in each task: its tools are in the prompts and in the record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import Env, Episode, RolloutContext, env_of
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tools.function_tool import Tool, tool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@dataclass
class NamedTools:
    tools: tuple[ToolSpec, ...] = ()

    def for_task(self, task: Task) -> Env:
        made: Tool = tool(name=task.data["tool"])(add)
        return ToolEnv([made])

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        return await self.for_task(task).open(task, context)


def play(env: Env, task: Task, prompts: list[str]) -> Trajectory:
    renderer = TemplateRenderer(hermes_tokenizer())
    call = '<tool_call>\n{"name": "plus", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return call if len(prompts) == 1 else "done"

    agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=999), 9999)
    context = RolloutContext(AttemptId("run", task.id, 0, 0), 0)
    (trajectory,) = asyncio.run(AgentLoop(agent, env).run(task, context))
    return trajectory


def test_each_task_shows_runs_and_records_its_own_tools() -> None:
    texts: list[str] = []
    right = play(NamedTools(), Task("a", "1 + 2?", {"tool": "plus"}), texts)
    assert [result.parts[0].text for turn in right.turns for result in turn.results] == ["3"]
    assert '"plus"' in texts[0] and right.turns[0].tools == right.turns[1].tools == (tool(name="plus")(add).spec,)
    texts = []
    wrong = play(NamedTools(), Task("b", "1 + 2?", {"tool": "sum"}), texts)
    assert '"plus"' not in texts[0] and [result.error for result in wrong.turns[0].results] == ["unknown tool"]


def test_tools_of_the_run_are_not_recorded_again() -> None:
    env = ToolEnv([tool(name="plus")(add)])
    assert env_of(env, Task("a", "?")) is env
    assert [turn.tools for turn in play(env, Task("a", "?"), []).turns] == [None, None]


def test_a_task_without_an_environment_fails_alone() -> None:
    failed = play(NamedTools(), Task("c", "?"), [])
    assert (failed.status, failed.turns) == (Status.ENVIRONMENT_FAILED, ())
    assert failed.reason is not None and failed.reason.startswith("KeyError: 'tool'")
