"""The greedy attempt of a group: sampled and recorded like the others, but scored separately and kept apart."""

import asyncio
from dataclasses import replace

import pytest
import torch
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.tools.function_tool import tool

TASKS = [Task(f"t{number}", (Message.user(f"hello {number}"),)) for number in range(3)]


@tool
def look() -> str:
    """Look."""
    return "seen"


class Log:
    def __init__(self):
        self.events = []

    async def record(self, *events):
        self.events += events


class SizeScorer:
    """Scores each attempt by the number of attempts that it is compared with; fails if ``broken`` returns True."""

    def __init__(self, broken=lambda group: False):
        self.sizes, self.broken = [], broken

    async def score(self, group, task):
        if self.broken(group):
            raise KeyError("broken")
        self.sizes.append(len(group))
        return tuple({"size": float(len(group))} for _ in group)


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def collect(renderer, scorer, greedy=True, reply="greedy"):
    """Return groups of two attempts, and the log."""
    log = Log()
    agent, best = (
        Agent(ScriptedEngine(renderer, lambda prompt, text=text: text), renderer, SamplingParams(max_tokens=99), 999)
        for text in ("sampled", reply)
    )
    collector = Collector(
        AgentLoop(agent, ToolEnv([look])),
        (scorer,),
        log,
        "test",
        RolloutLimits(),
        greedy=AgentLoop(best, ToolEnv([look])) if greedy else None,
    )
    return asyncio.run(groups_of(collector, TASKS, 2)), log


async def groups_of(collector, tasks, size):
    requests = [GroupRequest(group_id, task, size) for group_id, task in enumerate(tasks)]
    return [group async for group in collector.collect(requests)]


def test_the_greedy_attempt_has_the_next_sample_index_and_is_kept_apart(renderer):
    scorer = SizeScorer()
    groups, log = collect(renderer, scorer)
    for group in groups:
        assert [t.last_text for t in group.trajectories] == ["sampled"] * 2
        assert [t.attempt.sample_index for t in group.trajectories] == [0, 1]
        assert group.greedy.last_text == "greedy" and group.greedy.attempt.sort_key == (group.group_id, 2, 0)
        assert group.greedy.rewards == {"size": 1.0}
        assert [t.rewards for t in group.trajectories] == [{"size": 2.0}] * 2
    started = [event.attempt for event in log.events if isinstance(event, AttemptStarted)]
    ended = [event.trajectory.attempt for event in log.events if isinstance(event, AttemptFinished)]
    assert len(started) == 9 and sorted(started) == sorted(ended)


@pytest.mark.parametrize("size", [1, 2])
def test_the_greedy_attempt_and_the_group_fail_independently(renderer, size):
    groups, _ = collect(renderer, SizeScorer(lambda group: len(group) == size))
    for group in groups:
        statuses = [group.greedy.status, *{t.status for t in group.trajectories}]
        assert statuses == [Status.REWARD_FAILED, Status.COMPLETED][:: 1 if size == 1 else -1]


def test_a_greedy_attempt_does_not_change_the_sampled_ones():
    taskset = build("tinywiki", None, None, 0)
    renderer = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))

    def groups(with_greedy, seed=0):
        async def run():
            engine = TorchEngine(load_model(str(TINY_BASE_FOLDER), torch.float32), 512)
            agent = Agent(engine, renderer, SamplingParams(max_tokens=32), 512, seed)
            sampling = AgentLoop(agent, taskset.env)
            best = replace(sampling, agent=replace(agent, params=replace(agent.params, temperature=0.0)))
            greedy = best if with_greedy else None
            limits = RolloutLimits()
            collector = Collector(sampling, taskset.scorers, Log(), "test", limits, seed=seed, greedy=greedy)
            groups = await groups_of(collector, taskset.tasks("train")[:2], 2)
            await engine.close()
            return groups

        return asyncio.run(run())

    alone, beside, other = groups(False), groups(True), groups(True, seed=1)
    assert sampled(alone) == sampled(beside) != sampled(other)
    assert [record_of(group.greedy) for group in beside] == [record_of(group.greedy) for group in other]


def record_of(trajectory):
    return [(turn.action_ids, turn.logprobs, turn.rewards) for turn in trajectory.turns], trajectory.rewards


def sampled(groups):
    return [record_of(trajectory) for group in groups for trajectory in group.trajectories]
