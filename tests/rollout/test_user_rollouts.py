"""A rollout that a user wrote: whatever it does becomes the end of its own attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Status, Trajectory
from agent_r1.rollout import collector as collector_module
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits


class Panic(BaseException):
    """Like the panics of native libraries."""


@dataclass
class UserRollout:
    """Completes every attempt, after ``act`` in the group numbered 1."""

    act: Callable[[], Awaitable[object]]
    others: int = 0

    async def run(self, task: Task, context: RolloutContext) -> list[Trajectory]:
        if context.id.group_id == 1:
            await self.act()
        own = Trajectory(context.id, task.id, (), Status.COMPLETED)
        others = [replace(context.id, sample_index=100 + number) for number in range(self.others)]
        return [own, *(Trajectory(id, task.id, (), Status.COMPLETED) for id in others)]


def collect(rollout: Any, limits: RolloutLimits) -> list[Group]:
    collector = Collector(rollout, (), NullRecorder(), "run", limits)

    async def main() -> list[Group]:
        requests = [GroupRequest(number, Task(f"t{number}", ()), 2) for number in range(3)]
        return [group async for group in collector.collect(requests)]

    return asyncio.run(main())


def ends(groups: list[Group]) -> list[tuple[Status, str | None]]:
    """Return the ends of the attempts in the group numbered 1. All others have to be complete."""
    for group in (groups[0], groups[2]):
        assert [t.status for t in group.trajectories] == [Status.COMPLETED] * 2
    return [(t.status, t.reason) for t in groups[1].trajectories]


async def hang() -> None:
    await asyncio.get_running_loop().create_future()


async def hang_and_ignore_cancellation() -> None:
    for _ in range(2):  # its deadline, and the end of the event loop
        try:
            await hang()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("act", [hang, hang_and_ignore_cancellation])
def test_a_rollout_that_hangs_is_cancelled_at_its_deadline(
    act: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "CLOSING_SECONDS", 0.0)
    groups = collect(UserRollout(act), RolloutLimits(episode_seconds=2.0))
    assert ends(groups) == [(Status.CANCELLED, "the rollout ran past its deadline (episode_seconds)")] * 2


@pytest.mark.parametrize("error", [GeneratorExit, SystemExit, Panic, asyncio.CancelledError])
def test_a_rollout_that_raises_fails_alone(error: type[BaseException]) -> None:
    async def fail() -> None:
        raise error

    for status, reason in ends(collect(UserRollout(fail), RolloutLimits(retries=0))):
        assert status is Status.ENVIRONMENT_FAILED and error.__name__ in (reason or "")


@pytest.mark.parametrize("others", [1, 2])
def test_trajectories_of_other_attempts_are_refused_with_a_reason(others: int) -> None:
    rollout = UserRollout(lambda: asyncio.sleep(0), others=others)
    for group in collect(rollout, RolloutLimits(retries=0)):
        for trajectory in group.trajectories:
            assert trajectory.status is Status.ENVIRONMENT_FAILED
            assert "it has to return one trajectory, of attempt run:" in (trajectory.reason or "")
            assert f"run:{group.group_id}.100.0:t{group.group_id}" in (trajectory.reason or "")


def test_a_rollout_without_a_trajectory_fails() -> None:
    @dataclass
    class Silent:
        async def run(self, task: Task, context: RolloutContext) -> list[Trajectory]:
            return []

    for group in collect(Silent(), RolloutLimits(retries=0)):
        assert {t.status for t in group.trajectories} == {Status.ENVIRONMENT_FAILED}
        assert all("returned none" in (t.reason or "") for t in group.trajectories)
