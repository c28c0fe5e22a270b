"""When attempts and turns happened, by a clock that only the parts of a test advance."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from simulated_clock import SimulatedClock
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.events import AttemptFinished, Event
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.profile import EngineMeter, MeteredEngine
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory, TurnTiming
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.rollout.session import Rollout

TASK = Task("t", (Message.user("hello"),))


class PromptEngine(ScriptedEngine):
    """An engine that reports a first token after 0.25 seconds, and half of the prompt as prefilled."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        completion = await super().generate(prompt, params, session_id=session_id)
        return replace(completion, first_token_seconds=0.25, prefilled_tokens=len(prompt.token_ids) // 2)


class Finished:
    """A recorder of the trajectories that ended."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    async def record(self, *events: Event) -> None:
        self.trajectories += [event.trajectory for event in events if isinstance(event, AttemptFinished)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    return clock


def collect(rollout: Rollout, size: int, retries: int = 0) -> list[Trajectory]:
    """Return the attempts of a group, of which one runs at a time."""
    recorder = Finished()
    limits = RolloutLimits(concurrency=1, retries=retries)

    async def run() -> None:
        async for _ in Collector(rollout, (), recorder, "run", limits).collect([GroupRequest(0, TASK, size)]):
            pass

    asyncio.run(run())
    return recorder.trajectories


def test_turns_and_attempts_have_their_times(clock: SimulatedClock) -> None:
    renderer = TemplateRenderer(hermes_tokenizer())
    meter = EngineMeter(clock.read)
    engine = MeteredEngine(PromptEngine(renderer, clock.reply), meter)
    before = time.time()
    first, second = collect(AgentLoop(Agent(engine, renderer, SamplingParams(), 4000), ToolEnv([clock.look])), 2)
    assert [turn.timing for turn in first.turns] == [
        TurnTiming(start_seconds=0.0, end_seconds=1.0, first_token_seconds=0.25, env_seconds=30.0),
        TurnTiming(start_seconds=31.0, end_seconds=32.0, first_token_seconds=31.25, env_seconds=0.0),
    ]
    assert (first.seconds, first.wait_seconds, second.wait_seconds) == (32.0, 0.0, 32.0)
    assert before <= first.start_time <= second.start_time <= time.time()
    turns = [(trajectory, turn) for trajectory in (first, second) for turn in trajectory.turns]
    prompts = [len(trajectory.prompt_ids(turn)) for trajectory, turn in turns]
    assert meter.take() == {
        "engine/requests": 4.0,
        "engine/generated_tokens": sum(len(turn.action_ids) for _, turn in turns),
        "engine/prompt_tokens": sum(prompts),
        "engine/prefilled_tokens": sum(length // 2 for length in prompts),
        "engine/utilization": 4 / 64,
        "engine/running": 1.0,
    }
    assert set(meter.take().values()) == {0.0}
