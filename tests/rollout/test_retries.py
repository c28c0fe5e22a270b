"""Retries: STATUS_POLICY alone decides which failed attempts are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.events import AttemptFinished, AttemptStarted, Event
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Group, Rewards, Status, Trajectory
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine

Fails = Callable[[RolloutContext], Exception | None]


class OneStep:
    """Ends with the first action, or raises the exception that ``fails`` returns."""

    tools = ()

    def __init__(self, fails: Fails) -> None:
        self._fails = fails

    async def open(self, task: Task, context: RolloutContext) -> Any:
        error = self._fails(context)

        class Episode:
            start = task.messages

            async def step(self, action: object) -> Transition:
                if error is not None:
                    raise error
                return Transition((), end="terminal")

            async def close(self) -> None:
                return None

        return Episode()


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    async def record(self, *events: Event) -> None:
        self.events += events


class One:
    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        return tuple({"one": 1.0} for _ in group)


class Unsure:
    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        raise KeyError("no answer")


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(hermes_tokenizer())


def collect(
    renderer: TemplateRenderer,
    fails: Fails,
    retries: int = 2,
    scorer: Any = None,
    greedy: bool = False,
    **limits: float,
) -> tuple[Group, Log]:
    log, engine = Log(), ScriptedEngine(renderer, lambda prompt: "done")
    agent = Agent(engine, renderer, SamplingParams(max_tokens=50), 2000)
    bounds = RolloutLimits(retries=retries, retry_seconds=0.01, **limits)
    scorers = (scorer or One(),)
    rollout = AgentLoop(agent, OneStep(fails))
    collector = Collector(rollout, scorers, log, "run", bounds, greedy=rollout if greedy else None)

    async def only() -> Group:
        request = GroupRequest(5, Task("t", (Message.user("hello"),)), 3, version=3)
        (group,) = [group async for group in collector.collect([request])]
        return group

    return asyncio.run(only()), log


def failing_before(retry: int, index: int = 1) -> Fails:
    def fails(context: RolloutContext) -> Exception | None:
        attempt = context.id
        return OSError(f"try {attempt.retry}") if attempt.sample_index == index and attempt.retry < retry else None

    return fails


def test_a_failed_attempt_is_repeated_until_it_succeeds(renderer: TemplateRenderer) -> None:
    group, log = collect(renderer, failing_before(2))
    assert [t.attempt.sort_key for t in group.trajectories] == [(5, 0, 0), (5, 1, 2), (5, 2, 0)]
    assert all(t.rewards == {"one": 1.0} for t in group.trajectories)
    assert [t.attempt.sort_key for t in group.retried] == [(5, 1, 0), (5, 1, 1)]
    reasons = [t.reason or "" for t in group.retried]
    assert reasons[0].startswith("OSError: try 0 (test_retries.py:") and reasons[1].startswith("OSError: try 1 (")
    assert not any(t.rewards for t in group.retried)
    started = [event.attempt.sort_key for event in log.events if isinstance(event, AttemptStarted)]
    finished = [event.trajectory.attempt.sort_key for event in log.events if isinstance(event, AttemptFinished)]
    assert sorted(started) == sorted(finished) and len(set(finished)) == 5
    # the end of a failed attempt is recorded together with the start of its replacement
    again = log.events.index(AttemptStarted(group.retried[1].attempt, "train", 3))
    assert log.events[again - 1] == AttemptFinished(group.retried[0])


def test_retries_are_limited_and_the_last_failure_stays(renderer: TemplateRenderer) -> None:
    group, _ = collect(renderer, failing_before(99), retries=1)
    assert group.trajectories[1].attempt.retry == 1
    assert group.trajectories[1].status is Status.ENVIRONMENT_FAILED and len(group.retried) == 1
    group, _ = collect(renderer, failing_before(99), retries=0)
    assert group.trajectories[1].attempt.retry == 0 and group.retried == ()


@pytest.mark.parametrize("what", ["reward", "deadline"])
def test_failed_rewards_and_missed_deadlines_are_not_retried(renderer: TemplateRenderer, what: str) -> None:
    def slow(context: RolloutContext) -> None:
        return None

    if what == "reward":
        group, _ = collect(renderer, slow, scorer=Unsure())
        assert {t.status for t in group.trajectories} == {Status.REWARD_FAILED}
    else:
        group, _ = collect(renderer, slow, episode_seconds=0.0)
        assert {t.status for t in group.trajectories} == {Status.CANCELLED}
    assert group.retried == ()


def test_every_status_has_a_policy() -> None:
    assert set(STATUS_POLICY) == set(Status)
    with pytest.raises(TypeError, match="item assignment"):
        STATUS_POLICY[Status.CANCELLED] = "train"  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "status"),
    [((1.0,), Status.COMPLETED), ((1.0, 2.0), Status.REWARD_FAILED), ("1.0", Status.REWARD_FAILED)],
)
def test_invalid_rewards_fail_the_attempt(renderer: TemplateRenderer, given: Any, status: Status) -> None:
    class Given:
        async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
            return tuple({"em": given} for _ in group)

    group, _ = collect(renderer, lambda context: None, scorer=Given())
    assert {t.status for t in group.trajectories} == {status}


def test_a_timeout_inside_a_scorer_is_not_reported_as_its_time_limit(renderer: TemplateRenderer) -> None:
    class Late:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
            await asyncio.sleep(self.seconds)
            raise TimeoutError("the judge did not answer")

    own, _ = collect(renderer, lambda context: None, scorer=Late(0), score_seconds=5)
    ours, _ = collect(renderer, lambda context: None, scorer=Late(5), score_seconds=0.05)
    assert "the judge did not answer" in (own.trajectories[0].reason or "")
    assert "a scorer took more than 0.05 s" in (ours.trajectories[0].reason or "")
