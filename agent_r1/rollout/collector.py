"""The collector makes groups of attempts concurrently, scores and records the attempts, and yields the groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agent_r1.core.environment import ModelClient, RolloutContext
from agent_r1.core.events import AttemptFinished, AttemptStarted, Event, Recorder
from agent_r1.core.profile import measure
from agent_r1.core.task import Task
from agent_r1.core.trajectory import (
    STATUS_POLICY,
    AttemptId,
    Continuation,
    Group,
    RewardValue,
    Scorer,
    Scores,
    Status,
    Trajectory,
    Unscored,
)
from agent_r1.rollout.replay import Continuations, valued_turns
from agent_r1.rollout.session import CLOSE_SECONDS, Rollout
from agent_r1.rollout.user_code import isolate, validate_rewards
from agent_r1.tools.execution import run_detached

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for ``size`` attempts at ``task``. ``group_id`` is the index of the group in the run."""

    group_id: int
    task: Task
    size: int
    version: int = 0  # of the policy's weights when the group starts


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of the attempts."""

    concurrency: int = 256  # attempts that run at the same time
    episode_seconds: float = 600.0
    score_seconds: float = 600.0  # of one scorer for one group
    retries: int = 2  # repetitions of a failed attempt
    retry_seconds: float = 0.5  # the pause before the first repetition; each later pause is twice as long


FIRST_CONTINUATION = 10_000
"""The ``sample_index`` of the first continuation of an attempt is this number times 1 + that of the attempt."""

CLOSING_SECONDS = 2 * CLOSE_SECONDS + 5.0
"""Seconds that a rollout has after its deadline to close its episode. After this time, the rollout is cancelled."""


async def _at_once(requests: Iterable[GroupRequest]) -> AsyncIterator[GroupRequest]:
    for request in requests:
        yield request


class NullRecorder:
    """A recorder that stores nothing."""

    async def record(self, *events: Event) -> None:
        return None


class Examples(Protocol):
    """Solutions that are imitated, because no attempt at a task was a success."""

    def rollout(self, task: Task, attempts: Sequence[Trajectory]) -> Rollout | None:
        """Return a script that plays a solution of ``task``; None if one of its scored attempts is a success."""
        ...

    def fault(self, task: Task, example: Trajectory) -> str | None:
        """Return why a played and scored solution cannot be imitated; None if it can."""
        ...


class Collector:
    """Runs groups of attempts, scores them and records them.

    ``greedy`` makes one more attempt for each group, without random sampling, which is scored separately. ``examples``
    play a solution for a group without success, which is no attempt, and is not recorded. ``continuations`` continue
    attempts from each of their turns, which values the turns. ``models`` are those that environments can query, by
    role.
    """

    def __init__(
        self,
        rollout: Rollout,
        scorers: tuple[Scorer, ...],
        recorder: Recorder,
        run: str,
        limits: RolloutLimits,
        *,
        seed: int = 0,
        greedy: Rollout | None = None,
        examples: Examples | None = None,
        continuations: Continuations | None = None,
        models: Mapping[str, ModelClient] | None = None,
    ) -> None:
        self._rollout, self._greedy, self._scorers = rollout, greedy, scorers
        self._recorder, self._run, self._limits = recorder, run, limits
        self._seed, self._models, self._examples = seed, models or {}, examples
        self._continuations = continuations
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def collect(
        self, requests: Iterable[GroupRequest] | AsyncIterable[GroupRequest]
    ) -> AsyncGenerator[Group, None]:
        """Yield the groups in the order of ``requests``, each after all its attempts are complete.

        A group starts when its request comes. If the caller closes the iterator, running attempts are cancelled.
        """
        started: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue(self._limits.concurrency)
        given = requests if isinstance(requests, AsyncIterable) else _at_once(requests)
        starter = asyncio.create_task(self._start_groups(given, started))
        try:
            while (group := await started.get()) is not None:
                yield await group
            await starter
        finally:
            starter.cancel()
            while not started.empty():
                if (unfinished := started.get_nowait()) is not None:
                    unfinished.cancel()

    async def _start_groups(
        self, requests: AsyncIterable[GroupRequest], started: asyncio.Queue[asyncio.Task[Group] | None]
    ) -> None:
        try:
            async for request in requests:
                group = asyncio.create_task(self._run_group(request))
                try:
                    await started.put(group)
                except asyncio.CancelledError:
                    group.cancel()
                    raise
        finally:
            await started.put(None)

    async def _run_group(self, request: GroupRequest) -> Group:
        task, size, version = request.task, request.size, request.version
        rollouts = [self._rollout] * size + ([] if self._greedy is None else [self._greedy])
        ids = [AttemptId(self._run, task.id, request.group_id, index) for index in range(len(rollouts))]
        await self._recorder.record(*(AttemptStarted(id, task.env_split, version) for id in ids))
        tries = await asyncio.gather(
            *(self._attempt(one, task, id, version, self._recorder) for one, id in zip(rollouts, ids, strict=True))
        )
        final = [same_index[-1] for same_index in tries]
        compared, greedy = await asyncio.gather(self._score(final[:size], task), self._score(final[size:], task))
        valued = await asyncio.gather(*(self._continue(one, task, version) for one in compared))
        compared = tuple(one for one, _ in valued)
        await self._recorder.record(*(AttemptFinished(trajectory) for trajectory in (*compared, *greedy)))
        retried = tuple(trajectory for same_index in tries for trajectory in same_index[:-1])
        example = await self._play_example(compared, task, AttemptId(self._run, task.id, request.group_id, len(ids)))
        continuations = tuple(one for _, some in valued for one in some)
        return Group(request.group_id, task, compared, next(iter(greedy), None), retried, example, continuations)

    async def _continue(
        self, attempt: Trajectory, task: Task, version: int
    ) -> tuple[Trajectory, tuple[Continuation, ...]]:
        # Return the attempt, which is a failure if a turn of it could not be valued, and its continuations.
        if (made := self._continuations) is None:
            return attempt, ()
        turns = [turn for turn in valued_turns(attempt) for _ in range(made.count)]
        first, seed = FIRST_CONTINUATION * (1 + attempt.attempt.sample_index), attempt.attempt.seed(self._seed)
        tries = await asyncio.gather(
            *(
                self._attempt(made.rollout(attempt, turn, seed), task, id, version, NullRecorder())
                for number, turn in enumerate(turns)
                for id in [replace(attempt.attempt, sample_index=first + number, retry=0)]
            )
        )
        scored = await self._score([same_index[-1] for same_index in tries], task)
        for turn in dict.fromkeys(turns):
            own = [one for one, continued in zip(scored, turns, strict=True) if continued == turn]
            if not any(STATUS_POLICY[one.status] == "train" and None not in one.rewards.values() for one in own):
                reason = f"turn {turn} could not be valued: {own[0].reason}"
                return replace(attempt, status=Status.REWARD_FAILED, reason=reason), ()
        found = zip(turns, scored, strict=True)
        return attempt, tuple(Continuation(attempt.attempt, turn, one) for turn, one in found)

    async def _play_example(self, compared: Sequence[Trajectory], task: Task, id: AttemptId) -> Trajectory | None:
        if self._examples is None:
            return None
        try:
            with isolate(_UserCodeFailure):
                rollout = self._examples.rollout(task, compared)
                if rollout is None:
                    return None
                (example,) = await self._score([await self._run_attempt(rollout, task, id)], task)
                fault = self._examples.fault(task, example)
        except _UserCodeFailure as failure:
            fault = str(failure)
        if fault is None:
            return example
        log.warning("the solution of task %s is not imitated: %s", task.id, fault)
        return None

    async def _attempt(
        self, rollout: Rollout, task: Task, id: AttemptId, version: int, recorder: Recorder
    ) -> list[Trajectory]:
        trajectories = [await self._run_attempt(rollout, task, id)]
        while STATUS_POLICY[trajectories[-1].status] == "retry" and id.retry < self._limits.retries:
            await asyncio.sleep(self._limits.retry_seconds * 2**id.retry)
            id = replace(id, retry=id.retry + 1)
            await recorder.record(AttemptFinished(trajectories[-1]), AttemptStarted(id, task.env_split, version))
            trajectories.append(await self._run_attempt(rollout, task, id))
        return trajectories

    async def _run_attempt(self, rollout: Rollout, task: Task, id: AttemptId) -> Trajectory:
        arrival = time.perf_counter()
        async with self._slots:
            start_time, start = time.time(), time.perf_counter()
            deadline = asyncio.get_running_loop().time() + self._limits.episode_seconds
            context = RolloutContext(id, id.seed(self._seed), deadline, self._models)
            try:
                # The rollout can be user code. A rollout that stops at its deadline has time to close its episode.
                async with asyncio.timeout_at(deadline + CLOSING_SECONDS):
                    with isolate(_UserCodeFailure):
                        trajectories = await run_detached(rollout.run(task, context))
                        # A second trajectory would be lost, because only the attempt ``id`` belongs to the group.
                        if (ids := [trajectory.attempt for trajectory in trajectories]) != [id]:
                            given = ", ".join(map(str, ids)) or "none"
                            raise ValueError(f"it has to return one trajectory, of attempt {id}, and returned {given}")
                        trajectory = trajectories[0]
            except _UserCodeFailure as failure:
                reason = f"the rollout failed: {failure}"
                trajectory = Trajectory(id, task.id, (), Status.ENVIRONMENT_FAILED, reason=reason)
            except TimeoutError:
                trajectory = Trajectory(
                    id, task.id, (), Status.CANCELLED, reason="the rollout ran past its deadline (episode_seconds)"
                )
            seconds = trajectory.seconds or time.perf_counter() - start  # user code may not measure it
            return replace(trajectory, start_time=start_time, wait_seconds=start - arrival, seconds=seconds)

    async def _score(self, trajectories: Sequence[Trajectory], task: Task) -> tuple[Trajectory, ...]:
        # A trajectory whose rewards cannot be computed gets the status REWARD_FAILED.
        scorable = tuple(trajectory for trajectory in trajectories if STATUS_POLICY[trajectory.status] == "train")
        if not scorable:
            return tuple(trajectories)
        try:
            with isolate(_UserCodeFailure), measure("rewards"):
                scores = await self._compute_rewards(scorable, task)
            scored = {t.attempt: _with_rewards(t, given) for t, given in zip(scorable, scores, strict=True)}
        except _UserCodeFailure as failure:
            scored = {t.attempt: replace(t, status=Status.REWARD_FAILED, reason=str(failure)) for t in scorable}
        return tuple(scored.get(t.attempt, t) for t in trajectories)

    async def _compute_rewards(self, trajectories: tuple[Trajectory, ...], task: Task) -> list[Scores]:
        merged: list[dict[str, RewardValue | Unscored]] = [{} for _ in trajectories]
        for scorer in self._scorers:
            limit = asyncio.timeout(self._limits.score_seconds)
            try:
                async with limit:
                    scores = await run_detached(scorer.score(trajectories, task))
            except TimeoutError as error:
                if limit.expired():  # otherwise the scorer itself raised TimeoutError
                    raise TimeoutError(f"a scorer took more than {self._limits.score_seconds:g} s") from error
                raise
            for rewards, more in zip(merged, scores, strict=True):
                rewards.update(more)
        return list(merged)


class _UserCodeFailure(Exception):
    """Raised if a scorer or a rollout fails."""


def _with_rewards(trajectory: Trajectory, scores: Scores) -> Trajectory:
    try:
        with isolate(_UserCodeFailure):  # the conversion of a number can call user code too
            rewards = validate_rewards(scores)
            unscored = "; ".join(
                f"reward {name} could not be scored: {reward.reason}"
                for name, reward in scores.items()
                if isinstance(reward, Unscored)
            )
    except _UserCodeFailure as failure:
        return replace(trajectory, status=Status.REWARD_FAILED, reason=str(failure))
    of_calls = {name for turn in trajectory.turns for call in turn.call_rewards for name in call}
    of_turns = {name for turn in trajectory.turns for name in turn.rewards}
    ambiguous = sorted((of_calls & of_turns) | ((of_calls | of_turns) & rewards.keys()))
    if ambiguous:
        reason = f"reward {ambiguous[0]} is given at two levels: use different names for calls, turns and trajectories"
        return replace(trajectory, status=Status.REWARD_FAILED, reason=reason)
    for name, reward in rewards.items():
        if isinstance(reward, tuple) and trajectory.turns_for_rewards(len(reward)) is None:
            reason = f"reward {name} has {len(reward)} numbers for {len(trajectory.turns)} turns"
            return replace(trajectory, status=Status.REWARD_FAILED, reason=reason)
    return replace(trajectory, rewards=rewards, reason=unscored or trajectory.reason)


class StalenessController:
    """A controller that decides when groups start, so that the staleness of each attempt is at most ``max_staleness``.

    The staleness of an attempt is the number of optimizer steps between its oldest token and the step that trains on
    the attempt. If ``max_staleness`` is 0, training is synchronous.

    Groups are numbered from 0, and each step takes the next groups in this order. A step takes ``groups_per_step``
    groups. If the algorithm's filters keep no attempt of a group, the step takes one more group (dynamic sampling:
    DAPO, arXiv:2503.14476), but at most ``(1 + refill) * groups_per_step`` groups in total. ``groups_wanted`` is the
    number of groups that the current step takes, as far as known now.

    A group is allowed to start as soon as it is certain that the current step, or one of the next ``max_staleness``
    steps, takes the group. So each group that starts is taken by a step.
    """

    def __init__(
        self,
        steps: int,
        groups_per_step: int,
        *,
        max_staleness: int = 0,
        refill: int = 0,
        taken: int = 0,
        version: int = 0,
    ) -> None:
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self._max_groups = groups_per_step * (1 + refill)
        self._steps_left = steps
        self._taken = taken
        self._wanted = groups_per_step
        self._version = version
        self._changed = asyncio.Condition()

    @property
    def groups_wanted(self) -> int:
        return self._wanted

    async def acquire(self, group_id: int) -> int:
        """Wait until a group is allowed to start. Then return the current version of the weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: group_id < self._certain_groups())
        return self._version

    def _certain_groups(self) -> int:
        ahead = min(self._max_staleness, self._steps_left - 1)  # -1 after the last step, so that no group starts
        return self._taken + self._wanted + ahead * self._groups_per_step

    async def request_refill(self) -> None:
        """Let the current step take one more group. Call this method if a group of the step had no training signal."""
        async with self._changed:
            self._wanted = min(self._wanted + 1, self._max_groups)
            self._changed.notify_all()

    async def on_step_end(self, version: int) -> None:
        """Begin the next step. From now on, the engine samples with the weights of version ``version``."""
        async with self._changed:
            self._taken += self._wanted
            self._wanted = self._groups_per_step
            self._steps_left -= 1
            self._version = version
            self._changed.notify_all()
