"""The agent loop and the collector: how episodes end, and that no failure ends the run."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import Transition
from agent_r1.core.errors import EngineError
from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status, Unscored
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout import session as session_module
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine

LOOK = ToolSpec("look", "Look.", {"type": "object", "properties": {}, "required": []})
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


async def ignore_cancellation(hangs):
    """A retry loop with a bare except, which ignores its cancellation and ends after so many."""
    for _ in range(hangs):
        with suppress(BaseException):
            await asyncio.sleep(3600)


class CountingEnv:
    """Ends when the agent answers or after three turns; ``task.data`` selects how it misbehaves."""

    tools = (LOOK,)

    def __init__(self):
        self.closed = []

    async def open(self, task, context):
        await ignore_cancellation(task.data.get("opening", 0))
        if task.data.get("open"):
            raise RuntimeError(task.data["open"])
        return CountingEpisode(self, task, task.messages)


@dataclass
class CountingEpisode:
    env: CountingEnv
    task: Task
    start: tuple
    step_count: int = 0

    async def step(self, action):
        self.step_count += 1
        if self.task.data.get("step") == self.step_count:
            raise ValueError("the environment broke")
        if ends := self.task.data.get("ignores_cancellation"):
            await ignore_cancellation(ends)
        if self.task.data.get("blocks"):
            time.sleep(self.task.data["blocks"])
        while len(self.env.closed) < self.task.data.get("others", 0):
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.task.data.get("seconds", 0))
        if not action.message.calls:
            return Transition((), end="terminal")
        if self.step_count == 3:
            return Transition((), end="truncated")
        return Transition((Message.tool(f"seen {self.step_count}", action.message.calls[0].id),))

    async def close(self):
        self.env.closed.append(self.task.id)
        if self.task.data.get("close"):
            raise OSError("cannot close")
        await asyncio.sleep(self.task.data.get("closing", 0))
        await ignore_cancellation(self.task.data.get("never_closing", 0))


class Log:
    def __init__(self):
        self.events = []

    async def record(self, *events):
        self.events += events


class LengthScorer:
    async def score(self, group, task):
        if task.data.get("score"):
            raise KeyError("no such answer")
        if reason := task.data.get("unscored"):
            return tuple({"turns": Unscored(reason), "em": 1.0, "f1": Unscored("no answer")} for _ in group)
        await ignore_cancellation(task.data.get("scoring", 0))
        return tuple({"turns": float(len(t.turns))} for t in group)


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def reply(prompt):
    """Call the tool twice and then answer, unless the prompt contains a keyword."""
    if "forever" in prompt:
        return CALL
    if "engine" in prompt:
        raise EngineError("the engine is down")
    return "done" if prompt.count("seen") >= 2 else CALL


def task(name, text="hello", **data):
    return Task(name, (Message.user(text),), data)


def collect(renderer, tasks, size=2, context=2000, limits=None, max_tokens=200):
    env, log = CountingEnv(), Log()
    engine = ScriptedEngine(renderer, reply)
    agent = Agent(engine, renderer, SamplingParams(max_tokens=max_tokens), context)
    collector = Collector(AgentLoop(agent, env), (LengthScorer(),), log, "test", limits or RolloutLimits())

    async def run():
        requests = [GroupRequest(group_id, t, size) for group_id, t in enumerate(tasks)]
        return [group async for group in collector.collect(requests)]

    return asyncio.run(run()), env, log, engine


def test_an_episode_runs_to_its_end_with_exact_prompts(renderer):
    groups, env, _, engine = collect(renderer, [task("a")], size=1)
    trajectory = groups[0].trajectories[0]
    assert trajectory.status is Status.COMPLETED and not trajectory.truncated
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert trajectory.rewards == {"turns": 3.0}
    last = trajectory.turns[-1]
    rendered = renderer.render_text(trajectory.messages[:-1], (LOOK,), add_generation_prompt=True)
    assert trajectory.prompt_ids(last) == renderer.encode(rendered)
    assert all(len(turn.logprobs) == len(turn.action_ids) for turn in trajectory.turns)
    assert env.closed == ["a"] and engine.released == [str(trajectory.attempt)]


@pytest.mark.parametrize(
    ("broken", "status", "reason", "turns"),
    [
        (task("x", open="no room"), Status.ENVIRONMENT_FAILED, "RuntimeError: no room", 0),
        (task("x", step=2), Status.ENVIRONMENT_FAILED, "ValueError: the environment broke", 1),
        (task("x", text="engine"), Status.ENGINE_FAILED, "EngineError: the engine is down", 0),
        (task("x", score=True), Status.REWARD_FAILED, "KeyError: 'no such answer'", 3),
        (task("x", close=True), Status.COMPLETED, None, 3),
        (task("x", closing=60), Status.COMPLETED, None, 3),
        (task("x", text="forever"), Status.OUT_OF_TURNS, None, 3),
        (task("x", seconds=3600), Status.CANCELLED, "the episode ran past its deadline (episode_seconds)", 0),
    ],
    ids=lambda value: str(value) if isinstance(value, Status) else "",
)
def test_a_failing_episode_gets_a_status_and_does_not_affect_others(
    renderer, broken, status, reason, turns, monkeypatch
):
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.2)
    tasks = [task("before"), broken, task("after")]
    seconds = 3.0 if status is Status.CANCELLED else 600.0
    groups, _, _, engine = collect(renderer, tasks, limits=RolloutLimits(episode_seconds=seconds, retries=0))
    for trajectory in groups[1].trajectories:
        assert (trajectory.status, len(trajectory.turns)) == (status, turns)
        assert trajectory.reason == reason if reason is None else reason in trajectory.reason
    for group in (groups[0], groups[2]):
        assert [t.status for t in group.trajectories] == [Status.COMPLETED] * 2
        assert [t.rewards for t in group.trajectories] == [{"turns": 3.0}] * 2
    assert len(engine.released) == 6


def test_rewards_that_could_not_be_scored_are_none_with_their_reasons(renderer):
    groups, _, _, _ = collect(renderer, [task("a", unscored="KeyError: 'gold'")], size=1)
    trajectory = groups[0].trajectories[0]
    assert trajectory.status is Status.COMPLETED and trajectory.rewards == {"turns": None, "em": 1.0, "f1": None}
    reasons = ("reward turns could not be scored: KeyError: 'gold'", "reward f1 could not be scored: no answer")
    assert trajectory.reason == "; ".join(reasons)


@pytest.mark.parametrize(
    ("data", "status", "turns"),
    [
        ({"opening": 2}, Status.CANCELLED, 0),
        ({"ignores_cancellation": 2}, Status.CANCELLED, 0),
        ({"never_closing": 2}, Status.COMPLETED, 3),
        ({"scoring": 2}, Status.REWARD_FAILED, 3),
    ],
    ids=str,
)
def test_code_that_ignores_cancellation_is_abandoned(renderer, data, status, turns, monkeypatch):
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.2)
    agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 2000)
    episode_seconds = 0.3 if status is Status.CANCELLED else 600.0
    limits = RolloutLimits(
        episode_seconds=episode_seconds, score_seconds=0.3 if "scoring" in data else 600.0, retries=0
    )
    collector = Collector(AgentLoop(agent, CountingEnv()), (LengthScorer(),), Log(), "test", limits)

    async def only():
        (group,) = [group async for group in collector.collect([GroupRequest(0, task("x", **data), 1)])]
        return group.trajectories[0]

    trajectory = asyncio.run(only())
    assert (trajectory.status, len(trajectory.turns)) == (status, turns)


def test_a_step_that_blocks_the_loop_past_the_deadline_is_cancelled(renderer):
    last = task("x", "seen seen", blocks=0.4)  # the last step of the episode
    groups, *_ = collect(renderer, [last], size=1, limits=RolloutLimits(episode_seconds=0.2, retries=0))
    assert groups[0].trajectories[0].status is Status.CANCELLED


def test_a_full_context_ends_the_episode(renderer):
    first = len(renderer.render((Message.user("hello"),), (LOOK,)).token_ids)
    groups, *_ = collect(renderer, [task("a")], size=1, context=first + 100)
    trajectory = groups[0].trajectories[0]
    assert trajectory.status is Status.OUT_OF_TOKENS and trajectory.truncated
    final = trajectory.turns[-1]
    assert len(trajectory.prompt_ids(final)) + len(final.action_ids) <= first + 100


def test_the_bridge_after_a_truncated_action_adds_the_end_token(renderer):
    groups, *_ = collect(renderer, [task("a")], size=1, max_tokens=20)
    turns = groups[0].trajectories[0].turns
    assert turns[0].finish_reason == "length" and len(turns[0].action_ids) == 20
    assert turns[0].action.message.calls[0].error is not None
    assert turns[1].new_ids[0] == renderer.end_token_id


def test_groups_are_yielded_in_order_and_all_attempts_are_recorded(renderer):
    tasks = [task("slow", seconds=0.3), task("quick"), task("middle", seconds=0.02)]
    groups, _, log, _ = collect(renderer, tasks)
    assert [group.group_id for group in groups] == [0, 1, 2]
    started = [event.attempt for event in log.events if isinstance(event, AttemptStarted)]
    finished = [event.trajectory.attempt for event in log.events if isinstance(event, AttemptFinished)]
    assert len(started) == 6 and sorted(started) == sorted(finished)
    assert finished[0].task == "quick"


def test_a_slow_episode_does_not_delay_others(renderer):
    async def run():
        env, log = CountingEnv(), Log()
        agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 2000)
        collector = Collector(AgentLoop(agent, env), (), log, "test", RolloutLimits())
        requests = [GroupRequest(0, task("slow", others=29), 1)] + [
            GroupRequest(i, task(f"t{i}"), 1) for i in range(1, 30)
        ]
        async for _ in collector.collect(requests):
            return [event.trajectory.task_id for event in log.events if isinstance(event, AttemptFinished)]

    assert asyncio.run(run())[-1] == "slow"


def test_closing_the_collector_cancels_running_attempts(renderer):
    async def run():
        env = CountingEnv()
        agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 2000)
        collector = Collector(AgentLoop(agent, env), (), Log(), "test", RolloutLimits())
        requests = [GroupRequest(0, task("quick"), 1), GroupRequest(1, task("slow", seconds=60), 1)]
        groups = collector.collect(requests)
        await anext(groups)
        await groups.aclose()
        await asyncio.sleep(0.05)
        return env.closed

    assert asyncio.run(run()) == ["quick", "slow"]
