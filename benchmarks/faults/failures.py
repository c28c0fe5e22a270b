"""Environments, rewards and engines that fail in the middle of whole runs (T9 to T11)."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from case import Case, Outcome
from hostile import ENDED, RUN, WENT_ON, Crash, Hostile, case, control, policy_of, quiet, ran, small_taskset

from agent_r1.core import threads as worker
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import EngineError, RunStopped
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.messages import Message, Text
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Scorer, Scores, Status, Trajectory
from agent_r1.inference import torch_engine
from agent_r1.rollout import agent_loop, session
from agent_r1.training import run

STUBBORN = 5.0
"""Seconds for which code swallows that it was cancelled; at its end a run waits for that."""

GRACE = 1.0
"""Seconds that something may take above its limit."""


def hostile_taskset(crash: Crash) -> TaskSet:
    taskset = small_taskset()
    return replace(taskset, env=Hostile(taskset.env, crash))


def crashing_once(seed: int, retries: int = 2) -> Outcome:
    """Attempts of every other group crash at their first try, at opening or at their first step."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> None:
        attempt = context.id
        if attempt.group_id % 2 == 0 and attempt.retry == 0 and when == ("open", "step")[attempt.sample_index % 2]:
            fired[when] += 1
            raise OSError(f"connection {attempt.sample_index} was reset")
        if attempt.group_id % 2 and when == "close":
            fired["close"] += 1
            raise OSError("cannot close")

    left = ran(hostile_taskset(crash), seed, retries=retries)
    broken = list(left.unsound(completed=True))
    tried = [fate for fate in left.fates.values() if (fate.reason or "").startswith("tried again after environment")]
    if len(tried) != fired["open"] + fired["step"] or left.total("retried") != len(tried):
        broken.append(f"{fired.total()} attempts crashed, {len(tried)} were dropped and tried again")
    places = {attempt.sort_key[:2]: left.trajectories[attempt].status for attempt in sorted(left.trajectories)}
    lost = [place for place, status in places.items() if status == Status.ENVIRONMENT_FAILED]
    return Outcome(fired.total(), (*broken, *(f"place {place} was lost" for place in lost)))


def failing_share(share: float) -> tuple[Crash, Counter[str]]:
    """An environment that is broken for a share of the groups."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> None:
        if when == "step" and (context.id.group_id * 7919 % 100) < 100 * share:
            fired["step"] += 1
            raise OSError("the server is gone")

    return crash, fired


def crashing_for_ever(seed: int, share: float = 1.0, **settings: Any) -> Outcome:
    crash, fired = failing_share(share)
    left = ran(hostile_taskset(crash), seed, **settings)
    broken = list(left.unsound(completed=False))
    if len(left.digests) > 1 and share == 1:
        broken.append("weights moved, of nothing")
    said = str(left.error)
    wanted = ("environment_failed: OSError: the server is gone", "for example run:", "what to do")
    if left.error is not None and (len(said.splitlines()) > 24 or not all(text in said for text in wanted)):
        broken.append(UNNAMED)
    return Outcome(fired["step"], tuple(broken))


def tolerated(seed: int, share: float = 0.25) -> Outcome:
    """A quarter of the groups fails: no reason to stop."""
    crash, fired = failing_share(share)
    left = ran(hostile_taskset(crash), seed, retries=0, steps=6)
    return Outcome(fired["step"], tuple(left.unsound(completed=True)))


class Same:
    """A scorer that tells attempts of the run apart in ``groups`` first groups, and after that none."""

    def __init__(self, scorer: Scorer, fired: Counter[str], groups: int) -> None:
        self._scorer, self._fired, self._groups = scorer, fired, groups

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        attempt = group[0].attempt
        if attempt.run != RUN or attempt.group_id < self._groups:
            return await self._scorer.score(group, task)
        self._fired["groups"] += 1
        return tuple({"em": 1.0} for _ in group)


def nothing_learned(seed: int, groups: int = 0, **settings: Any) -> Outcome:
    """Every reward is the same, so that DAPO's filter leaves nothing of any step, and nothing of its refills."""
    fired, taskset = Counter[str](), small_taskset()
    scorers = tuple(Same(scorer, fired, groups) for scorer in taskset.scorers)
    filters = {"algorithm": "dapo", "reward_weights.found": 0.0, "algorithm.max_refill_rounds": 1}
    left = ran(replace(taskset, scorers=scorers), seed, **filters, **settings)
    broken = list(left.unsound(completed=False))
    if left.error is not None and "3 steps in a row, nothing_learned: " not in str(left.error):
        broken.append(f"it was not for nothing learned that it was stopped but: {left.error}")
    if left.error is not None and (len(left.digests), len(left.warnings), left.total("groups")) != (1, 3, 24):
        broken.append("it was not three steps with their refills, each warned of, in which no weight moved")
    return Outcome(fired["groups"], tuple(broken))


def hanging_environment(seed: int, limit: float = 0.8, hang: float = 3600.0) -> Outcome:
    fired, hung = Counter[str](), set[AttemptId]()

    async def crash(context: RolloutContext, when: str) -> None:
        attempt = context.id
        if attempt.group_id == 1 and when == ("open", "step", "close")[attempt.sample_index % 3] and attempt not in hung:
            hung.add(attempt)
            fired[when] += 1
            await (swallowing(min(hang, STUBBORN)) if attempt.sample_index == 3 else asyncio.sleep(hang))

    patches = (patch.object(session, "CLOSE_SECONDS", limit),)
    left = ran(hostile_taskset(crash), seed, patches, episode_seconds=limit, steps=1)
    broken = list(left.unsound(completed=True))
    late = [lived for lived in left.trajectories.values() if lived.seconds > 0.8 + GRACE]
    ended = sum(lived.status == Status.CANCELLED for lived in left.trajectories.values())
    if ended != fired["open"] + fired["step"] and not late:
        broken.append(f"{fired.total()} attempts hung, {ended} were cancelled")
    return Outcome(fired.total(), (*broken, *(f"{lived.attempt} took {lived.seconds:.1f} s" for lived in late)))


async def swallowing(seconds: float) -> None:
    """A retry loop with a bare except, which takes being cancelled for one more failure."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with suppress(BaseException):
            await asyncio.sleep(seconds)


async def _raising(error: BaseException) -> None:
    raise error


class Panic(BaseException):
    """As other languages' libraries raise."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words for it")


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
    """A step gives what is no transition, or raises what is no Exception."""
    fired = Counter[str]()

    async def crash(context: RolloutContext, when: str) -> Any:
        attempt = context.id
        if when != "step" or attempt.sample_index:
            return None
        fired["step"] += 1
        given = GIVEN[(attempt.group_id + seed) % len(GIVEN)]
        return await _raising(given) if isinstance(given, BaseException) else given

    left = ran(hostile_taskset(crash), seed, patches, retries=0, steps=3)
    broken = list(left.unsound(completed=True))
    statuses = Counter(lived.status for lived in left.trajectories.values())
    if left.error is None and statuses[Status.ENVIRONMENT_FAILED] != fired["step"]:
        broken.append(f"{fired['step']} steps were wrong, {statuses} is how attempts ended")
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
    """A scorer that fails, or gives no number, for every group but one in three."""

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
            await swallowing(STUBBORN)
        if isinstance(given, BaseException):
            raise given
        return tuple({"em": given} for _ in group)


def wrong_rewards(seed: int, instead: Any = None) -> Outcome:
    """``instead``: what a scorer gives in place of failing, as code does that hides its failures."""
    fired, taskset = Counter[str](), small_taskset()
    scorers = tuple(HostileScorer(scorer, fired, instead) for scorer in taskset.scorers)
    left = ran(replace(taskset, scorers=scorers), seed, steps=8, score_seconds=0.5)
    broken = list(left.unsound(completed=True))
    for attempt, fate in left.fates.items():
        if attempt.group_id % 3 == 0 and "reward" not in (fate.reason or ""):
            broken.append(f"{attempt} was {fate.fate}, with a reward nobody gave")
    return Outcome(fired["scores"], tuple(broken))


def dead_engine(seed: int, **settings: Any) -> Outcome:
    """From some generation on, the engine fails for everyone."""
    fired, asked = Counter[str](), itertools.count()

    class Dying(torch_engine.TorchEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            if (session_id or "").startswith(f"{RUN}:") and next(asked) > 60 + seed:
                fired["generations"] += 1
                raise EngineError("the server closed the connection")
            return await super().generate(prompt, params, session_id=session_id)

    left = ran(small_taskset(), seed, (patch.object(run, "TorchEngine", Dying),), steps=8, **settings)
    broken = list(left.unsound(completed=False))
    if left.error is not None and not isinstance(left.error, RunStopped):
        broken.append(f"no diagnosis but {left.error}")
    return Outcome(fired["generations"], tuple(broken))


def dead_thread(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """The engine's thread is ended from outside, with generations under way."""
    policy = policy_of(small_taskset())

    async def told(engine: torch_engine.TorchEngine) -> list[Any]:
        prompt = Prompt(policy.renderer.render((Message.user("Where?"),), ()).token_ids)
        under_way = [asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=300))) for _ in range(8)]
        await asyncio.sleep(0.05)
        thread = next(t for t in threading.enumerate() if t.name == "engine" and t not in before)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        async with asyncio.timeout(3):
            return [*await asyncio.gather(*under_way, return_exceptions=True), *await _later(engine, prompt)]

    before = set(threading.enumerate())
    try:
        with ExitStack() as stack:
            for one in (quiet(), *patches):
                stack.enter_context(one)
            answers = asyncio.run(told(torch_engine.TorchEngine(policy.model, 512)))
    except TimeoutError:
        return Outcome(1, ("after three seconds nobody had been told",))
    return Outcome(1, tuple(f"got {answer!r}" for answer in answers if not isinstance(answer, EngineError)))


async def _later(engine: torch_engine.TorchEngine, prompt: Prompt) -> list[Any]:
    """What is asked of the engine after its death."""
    return await asyncio.gather(
        engine.generate(prompt, SamplingParams(max_tokens=3)), engine.digest(), return_exceptions=True
    )


def _silent(jobs: Any, waiting: Any, gone: Any) -> None:
    """A thread that dies as an executor's does: without a word."""
    while (job := jobs.get()) is not None:
        job()


UNNAMED = "the diagnosis does not name what happened"
NEVER = {"monitor.failure_share": 1.0}
AS_IT_IS = patch.object(agent_loop, "validate_transition", lambda given: given)
SILENT = patch.object(worker, "_work", _silent)

FAILURES: tuple[Case, ...] = (
    case(
        "T9a",
        "an environment crashes at open, step or close, once",
        "another attempt in the same place; the failed one dropped, with its reason",
        crashing_once,
        200,
        1,
        control("no retries", "were dropped and tried again", crashing_once, retries=0),
    ),
    case(
        "T9b",
        "an environment hangs at open, step or close",
        "cancelled in time, others go on",
        hanging_environment,
        30,
        1,
        control("no limit", " took ", hanging_environment, limit=30.0, hang=2.0),
    ),
    case(
        "T9c",
        "a step gives what is no transition, or raises CancelledError, SystemExit",
        "the attempt fails, the run does not",
        wrong_transitions,
        100,
        len(GIVEN),
        control("transitions taken as they are", ENDED, wrong_transitions, patches=(AS_IT_IS,)),
    ),
    case(
        "T10",
        "a reward raises, hangs, is NaN, infinite, None, text, of wrong length",
        "dropped with that reason, never 0",
        wrong_rewards,
        200,
        1,
        control("0 where it failed", "with a reward nobody gave", wrong_rewards, instead=0.0),
    ),
    case(
        "T11a",
        "every attempt fails",
        "stopped with a diagnosis, weights unchanged bit for bit",
        crashing_for_ever,
        500,
        1,
        control("no breaker", UNNAMED, crashing_for_ever, **NEVER),
    ),
    case(
        "T11b",
        "a quarter of the groups fails",
        "the run goes on",
        tolerated,
        100,
        1,
        control("four fifths fail", f"{ENDED}: the run was stopped", tolerated, share=0.8),
    ),
    case(
        "T11c",
        "the engine fails for everyone from some generation on",
        "stopped with a diagnosis, weights those of the last step",
        dead_engine,
        500,
        1,
        control("no breaker", WENT_ON, dead_engine, **NEVER),
    ),
    case(
        "T11d",
        "every attempt earns the same, so that the algorithm's filter leaves nothing",
        "warned of, stopped with the reasons counted",
        nothing_learned,
        200,
        1,
        control("eight groups can be told apart", WENT_ON, nothing_learned, groups=8),
    ),
    case(
        "T11e",
        "the engine's thread is ended",
        "everyone who waits or asks later is told within 3 s",
        dead_thread,
        20,
        1,
        control("a thread that ends in silence", "nobody had been told", dead_thread, patches=(SILENT,)),
    ),
)
