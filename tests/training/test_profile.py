"""`agent-r1 train --profile`: tables of where the time of a step goes, which change no result of the run."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from scenarios import MICRO, micro_taskset
from simulated_clock import SimulatedClock
from tests_tokenizer import hermes_tokenizer

from agent_r1.cli import main
from agent_r1.config import Layer, resolve
from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.profile import Part, StepProfile, StepProfiler
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Scores, Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.observing_engines import ProfiledEngine
from agent_r1.renderers.profiled_renderer import ProfiledRenderer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted_agent import NullRecorder, no_gate
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

TASK = Task("t", (Message.user("hello"),))


@dataclass
class SlowScorer:
    """A scorer that takes 5 seconds."""

    clock: SimulatedClock

    async def score(self, group: tuple[Trajectory, ...], task: Task) -> tuple[Scores, ...]:
        self.clock.now += 5.0
        return tuple({"em": 1.0} for _ in group)


def test_slow_tools_engines_and_scorers_have_their_time() -> None:
    clock = SimulatedClock()
    profiler = StepProfiler(clock.read, lambda: 0.0)
    renderer = TemplateRenderer(hermes_tokenizer())
    agent = Agent(
        ProfiledEngine(ScriptedEngine(renderer, clock.reply), profiler),
        ProfiledRenderer(renderer, profiler),
        SamplingParams(max_tokens=400),
        4000,
        profiler=profiler,
    )
    rollout = AgentLoop(agent, ToolEnv([clock.look]))
    (trajectory,) = asyncio.run(rollout.run(TASK, RolloutContext(AttemptId("run", "t", 0, 0), 0)))
    assert len(trajectory.turns) == 2
    times = {part.value: time.seconds for part, time in profiler.take().parts.items() if time.seconds}
    assert times == {"tools": 30.0, "servers": 2.0}

    async def collect() -> None:
        collector = Collector(rollout, (SlowScorer(clock),), NullRecorder(), "run", RolloutLimits(), profiler=profiler)
        async for _ in collector.collect([GroupRequest(0, TASK, 1)], no_gate):
            pass

    asyncio.run(collect())
    assert profiler.take().parts[Part.REWARDS].seconds == 5.0


class Lines(SilentProgress):
    """A progress display that keeps the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def train_micro(folder: Path, profile: int) -> list[str]:
    """Train for two steps; return the printed lines."""
    settings = {**MICRO, "steps": 2, "evaluate_every": 2, "algorithm": "ppo", "profile": profile, "run": str(folder)}
    taskset, lines = micro_taskset(), Lines()
    train(resolve(TrainConfig, [Layer("test", settings), Layer("recipe", taskset.recipe)]), taskset, lines)
    return lines.lines


def test_a_profiled_run_has_tables_and_the_results_of_any_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, profiled = train_micro(tmp_path / "plain", 0), train_micro(tmp_path / "profiled", 1)
    tables = [line for line in profiled if line.startswith("time of a step")]
    assert [table.splitlines()[0].split(", ")[1][:9] for table in tables] == ["mean of 1", "mean of 2"]
    assert not any(line.startswith("time of a step") for line in plain)

    with closing(RunReader(tmp_path / "plain")) as one, closing(RunReader(tmp_path / "profiled")) as other:
        assert run_digest(one) == run_digest(other)
        assert not any(name.startswith("profile") for name in one.metric_names())
        steps = [StepProfile.from_timings(step.values) for step in other.metrics()]
        walls = [sum(v for k, v in step.values.items() if k.endswith("_seconds")) for step in other.metrics()]
    measured = {part for part, time in steps[1].parts.items() if time.seconds > 0}
    assert measured >= set(Part) - {Part.SERVERS, Part.RANKS, Part.WAITING}
    for profile, wall in zip(steps, walls, strict=True):  # another clock, read at nearly the same time
        assert wall / 2 < profile.total.seconds < 2 * wall

    assert main(["show", str(tmp_path / "profiled")]) == 0
    assert "Time of a step" in (shown := capsys.readouterr().out) and "backward" in shown
    assert main(["show", str(tmp_path / "profiled"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["profile"]
    assert report["backward"]["seconds"] == pytest.approx(
        sum(profile.parts[Part.BACKWARD].seconds for profile in steps) / 2
    )
    assert main(["show", str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == {}
