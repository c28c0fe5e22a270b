"""Environments, rewards and engines that fail in the middle of whole runs (T9 to T11)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from fault_case import Case, Outcome
from hostile_runs import (
    CONTINUED,
    ENDED,
    RUN,
    Crash,
    Hostile,
    case,
    control,
    small_taskset,
    train,
)

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Scorer, Scores, Status, Trajectory
from agent_r1.rollout import agent_loop, session

SWALLOW_SECONDS = 5.0
"""Duration for which code swallows cancellations; the run waits for it at its end."""

LATE = 25.0
"""Tolerance above a time limit, in seconds."""


def hostile_taskset(crash: Crash) -> TaskSet:
    taskset = small_taskset()
    return replace(taskset, env=Hostile(taskset.env, crash))


def crashing_once(seed: int, retries: int = 2) -> Outcome:
    """In every other group all first attempts crash, at opening or at their first step."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> None:
        attempt = context.id
        if attempt.group_id % 2 == 0 and attempt.retry == 0 and when == ("open", "step")[attempt.sample_index % 2]:
            fired[when] += 1
            raise OSError(f"connection {attempt.sample_index} was reset")
        if attempt.group_id % 2 and when == "close":
            fired["close"] += 1
            raise OSError("cannot close")

    record = train(hostile_taskset(crash), seed, retries=retries)
    broken = list(record.violations_if(completed=True))
    tried = [fate for fate in record.fates.values() if (fate.reason or "").startswith("tried again after environment")]
    if len(tried) != fired["open"] + fired["step"] or record.total("retried") != len(tried):
        broken.append(f"{fired.total()} attempts crashed, {len(tried)} were dropped and tried again")
    places = {attempt.sort_key[:2]: record.trajectories[attempt].status for attempt in sorted(record.trajectories)}
    lost = [place for place, status in places.items() if status == Status.ENVIRONMENT_FAILED]
    return Outcome(fired.total(), (*broken, *(f"position {place} was lost" for place in lost)))


def failing_share(share: float) -> tuple[Crash, Counter[str]]:
    """Return an environment that fails for a share of the groups."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> None:
        if when == "step" and (context.id.group_id * 7919 % 100) < 100 * share:
            fired["step"] += 1
            raise OSError("the server is gone")

    return crash, fired


def always_crashing(seed: int, share: float = 1.0, **settings: Any) -> Outcome:
    crash, fired = failing_share(share)
    record = train(hostile_taskset(crash), seed, **settings)
    broken = list(record.violations_if(completed=False))
    if len(record.checksums) > 1 and share == 1:
        broken.append("the weights changed without data")
    message = str(record.error)
    expected = ("environment_failed: OSError: the server is gone", "for example run:", "what to do")
    if record.error is not None and (len(message.splitlines()) > 24 or not all(text in message for text in expected)):
        broken.append(NO_DIAGNOSIS)
    return Outcome(fired["step"], tuple(broken))


def tolerated(seed: int, share: float = 0.25) -> Outcome:
    """A quarter of the groups fails, which does not stop the run."""
    crash, fired = failing_share(share)
    record = train(hostile_taskset(crash), seed, retries=0, steps=6)
    return Outcome(fired["step"], tuple(record.violations_if(completed=True)))


def hanging_environment(seed: int, limit: float = 5.0, hang: float = 3600.0) -> Outcome:
    fired, hung = Counter[str](), set[AttemptId]()

    async def crash(context: RolloutContext, when: str) -> None:
        attempt = context.id
        if (
            attempt.group_id == 1
            and when == ("open", "step", "close")[attempt.sample_index % 3]
            and attempt not in hung
        ):
            hung.add(attempt)
            fired[when] += 1
            await (swallowing(min(hang, SWALLOW_SECONDS)) if attempt.sample_index == 3 else asyncio.sleep(hang))

    patches = (patch.object(session, "CLOSE_SECONDS", limit),)
    record = train(hostile_taskset(crash), seed, patches, episode_seconds=limit, steps=1)
    broken = list(record.violations_if(completed=True))
    late = [trajectory for trajectory in record.trajectories.values() if trajectory.seconds > LATE]
    ended = sum(trajectory.status == Status.CANCELLED for trajectory in record.trajectories.values())
    if ended < fired["open"] + fired["step"] and not late:
        broken.append(f"{fired.total()} attempts hung, {ended} were cancelled")
    return Outcome(
        fired.total(), (*broken, *(f"{trajectory.attempt} took {trajectory.seconds:.1f} s" for trajectory in late))
    )


async def swallowing(seconds: float) -> None:
    """A retry loop with a bare except, which treats a cancellation as one more failure."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with suppress(BaseException):
            await asyncio.sleep(seconds)


async def _raising(error: BaseException) -> None:
    raise error


class Panic(BaseException):
    """An exception as raised by extensions in other languages."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


GIVEN: tuple[Any, ...] = (
    {"messages": ()},
    Transition(({"role": "robot", "content": "x"},)),  # type: ignore[arg-type]
    Transition((Message("tool", (Text(b"bytes"),)),)),  # type: ignore[arg-type]
    Transition((), rewards={"found": "high"}),  # type: ignore[dict-item]
    Transition((), call_rewards=({"found": None},)),  # type: ignore[dict-item]
    Transition((), results=("page",)),  # type: ignore[arg-type]
    Transition(7),  # type: ignore[arg-type]
    Transition((), end="done"),  # type: ignore[arg-type]
    Transition((Message.user("x"),), end=False),  # type: ignore[arg-type]
    Transition((Message.user("x"),), results=(ToolResult((), ok=False, error={"code": 500}),)),  # type: ignore[arg-type]
    Transition((Message.user("x"),), results=(ToolResult((), ok=False, error=ValueError("x")),)),  # type: ignore[arg-type]
    Transition((Message("user", (Text("x"),), reasoning=b"x"),)),  # type: ignore[arg-type]
    asyncio.CancelledError("a task of its own"),
    SystemExit(3),
    TimeoutError("of its own"),
    RecursionError("too deep"),
    Unreadable(),
    Panic("in Rust"),
)


def wrong_transitions(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """A step returns an invalid transition, or raises a BaseException."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> Any:
        attempt = context.id
        if when != "step" or attempt.sample_index:
            return None
        fired["step"] += 1
        given = GIVEN[(attempt.group_id + seed) % len(GIVEN)]
        return await _raising(given) if isinstance(given, BaseException) else given

    record = train(hostile_taskset(crash), seed, patches, retries=0, steps=3)
    broken = list(record.violations_if(completed=True))
    statuses = Counter(trajectory.status for trajectory in record.trajectories.values())
    if record.error is None and statuses[Status.ENVIRONMENT_FAILED] != fired["step"]:
        broken.append(f"{fired['step']} steps were invalid, but attempts ended with {statuses}")
    return Outcome(fired["step"], tuple(broken))


REWARDS: tuple[Any, ...] = (
    KeyError("no answer"),
    asyncio.CancelledError("a judge's own"),
    float("nan"),
    float("inf"),
    None,
    "1.0",
    (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
    10**400,
    "hang",
    "swallow",
)


class HostileScorer:
    """A scorer that fails, or returns no number, for one group in three."""

    def __init__(self, scorer: Scorer, fired: Counter[str], instead: Any) -> None:
        self._scorer, self._fired, self._instead = scorer, fired, instead

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        attempt = group[0].attempt
        given = REWARDS[attempt.group_id // 3 % len(REWARDS)]
        if attempt.run != RUN or attempt.group_id % 3:
            return await self._scorer.score(group, task)
        self._fired["scores"] += len(group)
        given = given if self._instead is None else self._instead
        if given == "hang":
            await asyncio.sleep(3600)
        if given == "swallow":
            await swallowing(SWALLOW_SECONDS)
        if isinstance(given, BaseException):
            raise given
        return tuple({"em": given} for _ in group)


def wrong_rewards(seed: int, instead: Any = None) -> Outcome:
    """``instead`` replaces failures, as in code that hides them."""
    fired, taskset = Counter[str](), small_taskset()
    scorers = tuple(HostileScorer(scorer, fired, instead) for scorer in taskset.scorers)
    record = train(replace(taskset, scorers=scorers), seed, steps=8, score_seconds=0.5)
    broken = list(record.violations_if(completed=True))
    for attempt, fate in record.fates.items():
        if attempt.group_id % 3 == 0 and "reward" not in (fate.reason or ""):
            broken.append(f"{attempt} was {fate.fate}, although it has no reward")
    return Outcome(fired["scores"], tuple(broken))


NO_DIAGNOSIS = "the diagnosis does not name the cause"
NEVER = {"monitor.failure_share": 1.0}
UNVALIDATED = patch.object(agent_loop, "validate_transition", lambda given: given)

FAILURES: tuple[Case, ...] = (
    case(
        "T9a",
        "an environment crashes at open, step or close, once",
        "another attempt in the same position; the failed one is dropped with its reason",
        crashing_once,
        200,
        1,
        control("no retries", "were dropped and tried again", crashing_once, retries=0),
    ),
    case(
        "T9b",
        "an environment hangs at open, step or close",
        "cancelled in time, others continue",
        hanging_environment,
        30,
        1,
        control("no limit", " took ", hanging_environment, limit=300.0, hang=LATE + 1.0),
    ),
    case(
        "T9c",
        "a step returns no transition, or raises CancelledError, SystemExit",
        "the attempt fails, the run does not",
        wrong_transitions,
        100,
        len(GIVEN),
        control("transitions are not validated", ENDED, wrong_transitions, patches=(UNVALIDATED,)),
    ),
    case(
        "T10",
        "a reward raises, hangs, is NaN, infinite, None, text, of wrong length",
        "dropped with that reason, never 0",
        wrong_rewards,
        200,
        1,
        control("0 instead of a failure", "although it has no reward", wrong_rewards, instead=0.0),
    ),
    case(
        "T11a",
        "every attempt fails",
        "stopped with a diagnosis, weights unchanged bit for bit",
        always_crashing,
        500,
        1,
        control("no circuit breaker", CONTINUED, always_crashing, **NEVER),
    ),
    case(
        "T11b",
        "a quarter of the groups fails",
        "the run continues",
        tolerated,
        100,
        1,
        control("four fifths fail", f"{ENDED}: the run was stopped", tolerated, share=0.8),
    ),
)
