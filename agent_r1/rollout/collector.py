"""The collector: runs groups of attempts concurrently, scores and records them, and yields them in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import ModelClient, RolloutContext
from agent_r1.core.events import AttemptFinished, AttemptStarted, Recorder
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Group, RewardValue, Scorer, Scores, Status, Trajectory, Unscored
from agent_r1.rollout.session import CLOSE_SECONDS, Rollout
from agent_r1.rollout.user_code import isolate, unscored_reasons, validate_rewards
from agent_r1.tools.execution import run_detached


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for ``size`` attempts at ``task``. ``group_id`` is the number of the group in the run."""

    group_id: int
    task: Task
    size: int


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of the attempts.

    Attributes:
        concurrency: attempts at the same time.
        episode_seconds: the time limit of an attempt.
        score_seconds: the time limit of a scorer for a group.
        retries: how often a failed attempt is repeated if its status allows it.
        retry_seconds: the pause before the first repetition; it doubles with each further one.
    """

    concurrency: int = 256
    episode_seconds: float = 600.0
    score_seconds: float = 600.0
    retries: int = 2
    retry_seconds: float = 0.5


CLOSING_SECONDS = 2 * CLOSE_SECONDS + 5.0
"""Time that a rollout gets after its deadline, to release its session and close its episode. Then it is abandoned."""

Acquire = Callable[[GroupRequest], Awaitable[int]]
"""Waits until a group may start and returns the version of the weights that it starts with."""


class Collector:
    """Runs attempts and scores them.

    Args:
        rollout: makes the attempts.
        scorers: compute the rewards of a group.
        recorder: stores each start and end of an attempt.
        run: the name of the run, part of each attempt's id.
        seed: the root seed, from which each attempt's seed is derived.
        greedy: makes one more attempt at each task, whose sample index is the size of the group. It is scored
            separately, so that it does not influence scorers that compare the attempts of a group.
        models: models that environments may query, by role.
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
        models: Mapping[str, ModelClient] | None = None,
    ) -> None:
        self._rollout, self._greedy, self._scorers = rollout, greedy, scorers
        self._recorder, self._run, self._limits = recorder, run, limits
        self._seed, self._models = seed, models or {}
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def collect(self, requests: Iterable[GroupRequest], acquire: Acquire) -> AsyncGenerator[Group, None]:
        """Yield the groups in the order of ``requests``, each as soon as it and all earlier ones are complete.

        Waits for ``acquire`` before a group starts and for a free slot before an attempt starts. Closing the iterator
        cancels the attempts that are running.
        """
        started: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue(self._limits.concurrency)
        starter = asyncio.create_task(self._start_groups(requests, acquire, started))
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
        self,
        requests: Iterable[GroupRequest],
        acquire: Acquire,
        started: asyncio.Queue[asyncio.Task[Group] | None],
    ) -> None:
        """Start groups in order. Waits for ``acquire`` and, if the queue is full, for the consumer."""
        try:
            for request in requests:
                version = await acquire(request)
                group = asyncio.create_task(self._run_group(request, version))
                try:
                    await started.put(group)
                except asyncio.CancelledError:
                    group.cancel()
                    raise
        finally:
            await started.put(None)

    async def _run_group(self, request: GroupRequest, version: int) -> Group:
        """Make all attempts of a group, score them and record the results."""
        task, size = request.task, request.size
        rollouts = [self._rollout] * size + ([] if self._greedy is None else [self._greedy])
        ids = [AttemptId(self._run, task.id, request.group_id, index) for index in range(len(rollouts))]
        await self._recorder.record(*(AttemptStarted(id, task.split, version) for id in ids))
        tries = await asyncio.gather(
            *(self._attempt(rollout, task, id, version) for rollout, id in zip(rollouts, ids, strict=True))
        )
        final = [same_index[-1] for same_index in tries]
        compared, greedy = await asyncio.gather(self._score(final[:size], task), self._score(final[size:], task))
        await self._recorder.record(*(AttemptFinished(trajectory) for trajectory in (*compared, *greedy)))
        retried = tuple(trajectory for same_index in tries for trajectory in same_index[:-1])
        return Group(request.group_id, task, compared, next(iter(greedy), None), retried)

    async def _attempt(self, rollout: Rollout, task: Task, id: AttemptId, version: int) -> list[Trajectory]:
        """Make an attempt, and repeat it while its status asks for that. Only the last trajectory counts.

        The ends of the earlier ones are recorded here; their fates are decided together with the group's.
        """
        trajectories = [await self._run_attempt(rollout, task, id)]
        while STATUS_POLICY[trajectories[-1].status] == "retry" and id.retry < self._limits.retries:
            await asyncio.sleep(self._limits.retry_seconds * 2**id.retry)
            id = replace(id, retry=id.retry + 1)
            await self._recorder.record(AttemptFinished(trajectories[-1]), AttemptStarted(id, task.split, version))
            trajectories.append(await self._run_attempt(rollout, task, id))
        return trajectories

    async def _run_attempt(self, rollout: Rollout, task: Task, id: AttemptId) -> Trajectory:
        async with self._slots:
            deadline = asyncio.get_running_loop().time() + self._limits.episode_seconds
            context = RolloutContext(id, id.seed(self._seed), deadline, self._models)
            try:
                # A rollout may be user code. One that keeps its deadline has the time to close its episode after it.
                async with asyncio.timeout_at(deadline + CLOSING_SECONDS):
                    with isolate(_UserCodeFailure):
                        return _own_trajectory(await run_detached(rollout.run(task, context)), id)
            except _UserCodeFailure as failure:
                return Trajectory(id, task.id, (), Status.ENVIRONMENT_FAILED, reason=f"the rollout failed: {failure}")
            except TimeoutError:
                return Trajectory(id, task.id, (), Status.CANCELLED, reason="the rollout ran past its deadline")

    async def _score(self, trajectories: Sequence[Trajectory], task: Task) -> tuple[Trajectory, ...]:
        """Return the trajectories, with rewards if they can be trained. If a scorer fails, all of these fail."""
        scorable = tuple(trajectory for trajectory in trajectories if STATUS_POLICY[trajectory.status] == "train")
        if not scorable:
            return tuple(trajectories)
        try:
            with isolate(_UserCodeFailure):
                scores = await self._compute_rewards(scorable, task)
            scored = {t.attempt: _with_rewards(t, given) for t, given in zip(scorable, scores, strict=True)}
        except _UserCodeFailure as failure:
            scored = {t.attempt: replace(t, status=Status.REWARD_FAILED, reason=str(failure)) for t in scorable}
        return tuple(scored.get(t.attempt, t) for t in trajectories)

    async def _compute_rewards(self, trajectories: tuple[Trajectory, ...], task: Task) -> list[Scores]:
        """Return the rewards of all scorers by name, one mapping per trajectory."""
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


def _own_trajectory(trajectories: Sequence[Trajectory], id: AttemptId) -> Trajectory:
    """Return the only trajectory of a rollout. Raises ValueError unless there is one, and it is that of attempt ``id``.

    Others would be lost: the group, its scorers and the record of the run know nothing of their attempts.
    """
    ids = [trajectory.attempt for trajectory in trajectories]
    if ids != [id]:
        given = ", ".join(map(str, ids)) or "none"
        raise ValueError(f"it has to return one trajectory, of attempt {id}, and returned {given}")
    return trajectories[0]


class _UserCodeFailure(Exception):
    """A scorer or a rollout failed; the message says why."""


def _with_rewards(trajectory: Trajectory, scores: Scores) -> Trajectory:
    """Return the trajectory with its rewards, or as REWARD_FAILED if they are invalid.

    A reward name may be used at one level only (call, turn or trajectory), because its weight could not fit two. A
    reward per turn needs one number for each turn.
    """
    try:
        with isolate(_UserCodeFailure):  # converting a number may call user code too
            rewards, unscored = validate_rewards(scores), "; ".join(unscored_reasons(scores))
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
