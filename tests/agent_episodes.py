"""A policy behind the gateway: the scripted engine, and an agent function that acts in one episode."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import SamplingParams
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.gateway.agent_program import AgentHost, AgentProgram, AgentThreads
from agent_r1.gateway.config import GatewayConfig
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.scripted import ScriptedEngine

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Alba", "k": 2}}\n</tool_call>'
SEARCH = {
    "name": "search",
    "description": "Find a page.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "k": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": SEARCH}]
QUESTION = {"role": "user", "content": "Who rules Alba?"}
PAGE = "Alba: mayor Bruno."
ANSWER = "<answer>Bruno</answer>"


def search_then_answer(prompt):
    """Call the tool once, then answer."""
    return ANSWER if PAGE in prompt else f"I look.\n{CALL}"


class RecordingEngine(ScriptedEngine):
    """Keeps the prompt, the parameters and the completion of each generation."""

    def __init__(self, renderer, reply):
        super().__init__(renderer, reply)
        self.generations = []

    async def generate(self, prompt, params, *, session_id=None):
        completion = await super().generate(prompt, params, session_id=session_id)
        self.generations.append((prompt, params, completion))
        return completion


class CheckedThreads(AgentThreads):
    """Keeps the failed assertions of agents, which would otherwise only end their episodes."""

    def __init__(self):
        super().__init__()
        self.failed_checks = []

    async def call(self, function, base_url, key, task):
        try:
            return await super().call(function, base_url, key, task)
        except (AssertionError, pytest.fail.Exception) as error:
            self.failed_checks.append(error)
            raise


@dataclass
class Episodes:
    """Runs an agent function in an episode; ``engine`` is the engine of the last episode."""

    renderer: TemplateRenderer
    engine: ScriptedEngine | None = None
    host: AgentHost = field(default_factory=AgentHost)

    async def run(self, function, reply=search_then_answer, *, engine=RecordingEngine, max_tokens=400, context=6000,
                  seconds=None, temperature=1.0, config=None):  # fmt: skip
        self.engine = engine(self.renderer, reply)
        threads = CheckedThreads()
        self.host = AgentHost(config or GatewayConfig(), threads=threads)
        agent = Agent(self.engine, self.renderer, SamplingParams(temperature, max_tokens=max_tokens), context, seed=3)
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        rollout = RolloutContext(AttemptId("run", "t", 0, 0), 0, deadline)
        try:
            (trajectory,) = await AgentProgram(function, agent, self.host).run(Task("t", "Who rules Alba?"), rollout)
        finally:
            await self.host.close()
        for error in threads.failed_checks:
            raise error
        return trajectory

    def log(self):
        """The requests of the only key."""
        (access,) = self.host.gateway._accesses.values()
        return access.answers

    def is_abandoned(self):
        return any(pending.is_abandoned for pending in self.log()._pending)

    def play(self, function, *arguments, **options):
        """Return the trajectory of one episode."""
        return asyncio.run(self.run(function, *arguments, **options))


def wait_until(condition, seconds=60):
    """Wait until a condition holds, in a thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
