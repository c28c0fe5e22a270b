"""The collector: groups of attempts, concurrently, each scored and written down, in the order they were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env, RolloutContext
from agent_r1.core.events import AttemptFinished, AttemptStarted, Recorder
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Group, RewardValue, Scorer, Scores, Status, Trajectory, Unscored
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.user_code import as_rewards, boundary, objections
from agent_r1.tools.execution import severed


@dataclass(frozen=True, slots=True)
class Order:
    """Ask for a group: ``size`` attempts at ``task``; ``serial`` is the group's number in the run."""

    serial: int
    task: Task
    size: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the attempts under way, one attempt's seconds, and one scorer's seconds.

    An attempt whose status says so is tried again up to ``retries`` times, after ``retry_seconds``, doubled each time.
    """

    concurrency: int = 256
    episode_seconds: float = 600.0
    score_seconds: float = 600.0
    retries: int = 2
    retry_seconds: float = 0.5


Permit = Callable[[Order], Awaitable[int]]
"""Waits until a group may start; returns the version of the weights it starts under."""


class Collector:
    """Runs attempts in an environment and scores them.

    Where there is a ``greedy`` agent, it makes one more attempt at each task, whose member is the group's size. It
    is scored by itself, so that scorers which compare the attempts of a group see the same ones with and without it.
    """

    def __init__(
        self,
        agent: Agent,
        env: Env,
        scorers: tuple[Scorer, ...],
        recorder: Recorder,
        run: str,
        limits: Limits,
        greedy: Agent | None = None,
    ) -> None:
        self._agent, self._greedy, self._env, self._scorers = agent, greedy, env, scorers
        self._recorder, self._run = recorder, run
        self._limits = limits
        self._places = asyncio.Semaphore(limits.concurrency)

    async def collect(self, orders: Iterable[Order], permit: Permit) -> AsyncGenerator[Group, None]:
        """Groups in the order of ``orders``, each as soon as it and all before it are complete.

        Consumes orders. Waits for: ``permit`` before a group starts, a free place before an attempt.
        Closing the iterator cancels what is under way.
        """
        started: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue(self._limits.concurrency)
        starter = asyncio.create_task(self._start(orders, permit, started))
        try:
            while (group := await started.get()) is not None:
                yield await group
            await starter
        finally:
            starter.cancel()
            while not started.empty():
                if (left := started.get_nowait()) is not None:
                    left.cancel()

    async def _start(
        self, orders: Iterable[Order], permit: Permit, started: asyncio.Queue[asyncio.Task[Group] | None]
    ) -> None:
        """Start groups in order. Unblocked by: ``permit``, and the consumer taking groups."""
        try:
            for order in orders:
                version = await permit(order)
                group = asyncio.create_task(self._group(order, version))
                try:
                    await started.put(group)
                except asyncio.CancelledError:
                    group.cancel()
                    raise
        finally:
            await started.put(None)

    async def _group(self, order: Order, version: int) -> Group:
        actors = [self._agent] * order.size + ([] if self._greedy is None else [self._greedy])
        attempts = [AttemptId(self._run, order.task.id, order.serial, member) for member in range(len(actors))]
        await self._recorder.record(*(AttemptStarted(attempt, order.task.split, version) for attempt in attempts))
        trying = (self._try(actor, order, attempt, version) for actor, attempt in zip(actors, attempts, strict=True))
        tries = await asyncio.gather(*trying)
        lived = [of_place[-1] for of_place in tries]
        compared, apart = await asyncio.gather(
            self._score(lived[: order.size], order.task), self._score(lived[order.size :], order.task)
        )
        await self._recorder.record(*(AttemptFinished(trajectory) for trajectory in (*compared, *apart)))
        retried = tuple(trajectory for of_place in tries for trajectory in of_place[:-1])
        return Group(order.serial, order.task, compared, next(iter(apart), None), retried)

    async def _try(self, agent: Agent, order: Order, attempt: AttemptId, version: int) -> list[Trajectory]:
        """The attempt, and others in its place while they fail in a way that may pass; the last is the one that counts.

        An attempt that was tried again is over: its fate is the learner's to tell, with those of its group.
        """
        lived = [await self._live(agent, order.task, attempt)]
        while STATUS_POLICY[lived[-1].status] == "retry" and attempt.retry < self._limits.retries:
            await asyncio.sleep(self._limits.retry_seconds * 2**attempt.retry)
            attempt = replace(attempt, retry=attempt.retry + 1)
            await self._recorder.record(AttemptFinished(lived[-1]), AttemptStarted(attempt, order.task.split, version))
            lived.append(await self._live(agent, order.task, attempt))
        return lived

    async def _live(self, agent: Agent, task: Task, attempt: AttemptId) -> Trajectory:
        async with self._places:
            deadline = asyncio.get_running_loop().time() + self._limits.episode_seconds
            context = RolloutContext(attempt, attempt.seed(agent.seed), deadline)
            return await agent.live(self._env, task, context)

    async def _score(self, lived: Sequence[Trajectory], task: Task) -> tuple[Trajectory, ...]:
        """Give rewards to the trajectories that are to be trained; a failing scorer fails those."""
        survivors = tuple(trajectory for trajectory in lived if STATUS_POLICY[trajectory.status] == "train")
        if not survivors:
            return tuple(lived)
        try:
            with boundary(_ScorerFailed):
                scores = await self._rewards(survivors, task)
            scored = {t.attempt: _rewarded(t, given) for t, given in zip(survivors, scores, strict=True)}
        except _ScorerFailed as failure:
            scored = {t.attempt: replace(t, status=Status.REWARD_FAILED, reason=str(failure)) for t in survivors}
        return tuple(scored.get(t.attempt, t) for t in lived)

    async def _rewards(self, survivors: tuple[Trajectory, ...], task: Task) -> list[Scores]:
        """What all scorers gave, merged by name, one mapping per trajectory."""
        merged: list[dict[str, RewardValue | Unscored]] = [{} for _ in survivors]
        for scorer in self._scorers:
            given = await self._within(scorer.score(survivors, task))
            for names, more in zip(merged, given, strict=True):
                names.update(more)
        return list(merged)

    async def _within(self, scoring: Awaitable[tuple[Scores, ...]]) -> tuple[Scores, ...]:
        """What a scorer gives in its time; TimeoutError of ours is told from one of its own."""
        limit = asyncio.timeout(self._limits.score_seconds)
        try:
            async with limit:
                return await severed(scoring)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"a scorer took more than {self._limits.score_seconds:g} s") from error
            raise


class _ScorerFailed(Exception):
    """A scorer failed; says why."""


def _rewarded(trajectory: Trajectory, scores: Scores) -> Trajectory:
    """The trajectory with its rewards.

    It fails where one is none, where a name stands for two levels, because one weight could not fit both, and where a
    reward per turn has not one number for each.
    """
    try:
        with boundary(_ScorerFailed):  # numbers are somebody else's objects too
            rewards, missing = as_rewards(scores), "; ".join(objections(scores))
    except _ScorerFailed as failure:
        return replace(trajectory, status=Status.REWARD_FAILED, reason=str(failure))
    calls = {name for turn in trajectory.turns for given in turn.call_rewards for name in given}
    turns = {name for turn in trajectory.turns for name in turn.rewards}
    twice = sorted((calls & turns) | ((calls | turns) & rewards.keys()))
    if twice:
        reason = f"reward {twice[0]} is given at two levels: name calls, turns and trajectories apart"
        return replace(trajectory, status=Status.REWARD_FAILED, reason=reason)
    for name, reward in rewards.items():
        if isinstance(reward, tuple) and trajectory.turns_for_rewards(len(reward)) is None:
            reason = f"reward {name} has {len(reward)} numbers for {len(trajectory.turns)} turns"
            return replace(trajectory, status=Status.REWARD_FAILED, reason=reason)
    return replace(trajectory, rewards=rewards, reason=missing or trajectory.reason)
