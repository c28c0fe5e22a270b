"""A greedy attempt beside each group: lived, scored by itself, written down, and no part of the group."""

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
from agent_r1.envs import ToolEnv
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.renderer import Chat
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import Collector, Limits, Order
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.tools import tool

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


class Comparing:
    """Scores by the size of what it is given; fails where ``broken`` says so."""

    def __init__(self, broken=lambda group: False):
        self.sizes, self.broken = [], broken

    async def score(self, group, task):
        if self.broken(group):
            raise KeyError("broken")
        self.sizes.append(len(group))
        return tuple({"size": float(len(group))} for _ in group)


@pytest.fixture(scope="module")
def chat():
    return Chat(hermes_tokenizer())


def collect(chat, scorer, greedy=True, reply="greedy"):
    """Groups of two, and the log."""
    log = Log()
    agent, best = (
        Agent(ScriptedEngine(chat, lambda prompt, said=said: said), chat, SamplingParams(max_tokens=99), 999)
        for said in ("sampled", reply)
    )
    collector = Collector(agent, ToolEnv([look]), (scorer,), log, "test", Limits(), best if greedy else None)
    return asyncio.run(groups_of(collector, TASKS, 2)), log


async def groups_of(collector, tasks, size):
    async def permit(order):
        return 0

    orders = [Order(serial, task, size) for serial, task in enumerate(tasks)]
    return [group async for group in collector.collect(orders, permit)]


def test_the_greedy_attempt_is_the_member_after_the_last_and_stands_apart(chat):
    scorer = Comparing()
    groups, log = collect(chat, scorer)
    for group in groups:
        assert [t.last_text for t in group.trajectories] == ["sampled"] * 2
        assert [t.attempt.member for t in group.trajectories] == [0, 1]
        assert group.greedy.last_text == "greedy" and group.greedy.attempt.order == (group.serial, 2, 0)
        assert group.greedy.rewards == {"size": 1.0}
        assert [t.rewards for t in group.trajectories] == [{"size": 2.0}] * 2
    started = [event.attempt for event in log.events if isinstance(event, AttemptStarted)]
    ended = [event.trajectory.attempt for event in log.events if isinstance(event, AttemptFinished)]
    assert len(started) == 9 and sorted(started) == sorted(ended)


def test_without_a_greedy_agent_there_is_none(chat):
    scorer = Comparing()
    groups, log = collect(chat, scorer, greedy=False)
    assert [group.greedy for group in groups] == [None] * 3
    assert scorer.sizes == [2] * 3 and len(log.events) == 12


@pytest.mark.parametrize("size", [1, 2])
def test_the_greedy_attempt_and_the_group_fail_apart(chat, size):
    groups, _ = collect(chat, Comparing(lambda group: len(group) == size))
    for group in groups:
        statuses = [group.greedy.status, *{t.status for t in group.trajectories}]
        assert statuses == [Status.REWARD_FAILED, Status.COMPLETED][:: 1 if size == 1 else -1]


def test_sampled_attempts_keep_their_bits_beside_a_greedy_one():
    world = build("tinywiki", None, None, 0)
    chat = Chat(load_tokenizer(str(TINY_BASE_FOLDER)))

    def lived(with_greedy, seed=0):
        async def run():
            engine = TorchEngine(load_model(str(TINY_BASE_FOLDER), torch.float32), 512)
            agent = Agent(engine, chat, SamplingParams(max_tokens=32), 512, seed)
            best = replace(agent, sampling=replace(agent.sampling, temperature=0.0)) if with_greedy else None
            collector = Collector(agent, world.env, world.scorers, Log(), "test", Limits(), best)
            groups = await groups_of(collector, world.tasks("train")[:4], 3)
            await engine.close()
            return groups

        return asyncio.run(run())

    alone, beside, other = lived(False), lived(True), lived(True, seed=1)
    assert sampled(alone) == sampled(beside) != sampled(other)
    assert [said(group.greedy) for group in beside] == [said(group.greedy) for group in other]


def said(trajectory):
    return [(turn.action_ids, turn.logprobs, turn.rewards) for turn in trajectory.turns], trajectory.rewards


def sampled(groups):
    return [said(trajectory) for group in groups for trajectory in group.trajectories]
