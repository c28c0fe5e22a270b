"""StalenessController: no group waits forever, exceeds the staleness limit, or is sampled in vain."""

import asyncio
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings, strategies as st

from agent_r1.rollout.collector import StalenessController


@dataclass(frozen=True)
class Schedule:
    steps: int
    groups_per_step: int
    max_staleness: int
    refill: int

    def controller(self, kind=StalenessController):
        return kind(self.steps, self.groups_per_step, max_staleness=self.max_staleness, refill=self.refill)


@dataclass(frozen=True)
class SimulatedRun:
    """The number of completed steps when each group started, and the groups of each step."""

    started: list
    taken: list


async def spin(turns):
    for _ in range(turns):
        await asyncio.sleep(0)


async def simulate(controller, steps, useful, pauses):
    """Simulate a run. Each group and each update takes some iterations of the event loop."""
    started, taken = [], []
    under_way = asyncio.Queue()

    async def group(group_id):
        await spin(pauses[group_id % len(pauses)])
        return group_id

    async def start():
        for group_id in count():
            started.append(await controller.acquire(group_id))
            under_way.put_nowait(asyncio.create_task(group(group_id)))

    starter = asyncio.create_task(start())
    for step in range(steps):
        batch = []
        while len(batch) < controller.groups_wanted:
            batch.append(await (await under_way.get()))
            if not useful[batch[-1] % len(useful)]:
                await controller.request_refill()
        await spin(pauses[step % len(pauses)])
        taken.append(batch)
        await controller.on_step_end(step + 1)
    await spin(50)
    starter.cancel()
    return SimulatedRun(started, taken)


def run(controller, steps, useful, pauses, patience=2.0):
    """Simulate a run, or raise TimeoutError after ``patience`` seconds; it needs a few hundred iterations."""
    return asyncio.run(asyncio.wait_for(simulate(controller, steps, useful, pauses), patience))


def expected(schedule, useful):
    """Yield the groups of each step: until enough have a signal, or the refill limit is reached."""
    group_ids = count()
    for _ in range(schedule.steps):
        batch = []
        while sum(useful[group_id % len(useful)] for group_id in batch) < schedule.groups_per_step and len(
            batch
        ) < schedule.groups_per_step * (1 + schedule.refill):
            batch.append(next(group_ids))
        yield batch


def check(schedule, useful, pauses, kind=StalenessController):
    simulated = run(schedule.controller(kind), schedule.steps, useful, pauses)
    assert simulated.taken == list(expected(schedule, useful))
    assert len(simulated.started) == sum(map(len, simulated.taken)), "a group was sampled in vain"
    for step, batch in enumerate(simulated.taken):
        assert all(0 <= step - simulated.started[group_id] <= schedule.max_staleness for group_id in batch)
    return simulated


schedules = st.builds(Schedule, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
usefulness = st.lists(st.booleans(), min_size=1, max_size=12)
turns = st.lists(st.integers(0, 6), min_size=1, max_size=7)


@settings(max_examples=200, deadline=None)
@given(schedules, usefulness, turns)
def test_staleness_is_limited_and_no_group_starts_in_vain(schedule, useful, pauses):
    check(schedule, useful, pauses)


class TooEager(StalenessController):
    """Lets one group too many start."""

    def _certain_groups(self):
        return super()._certain_groups() + 1


class TooStrict(StalenessController):
    """Requests refills but does not let them start."""

    def _certain_groups(self):
        return min(super()._certain_groups(), self._taken + self._groups_per_step)


def test_the_checks_detect_a_controller_that_starts_too_many_or_too_few_groups():
    schedule = Schedule(3, 2, 0, 2)
    check(schedule, [True, False, False], [1])
    with pytest.raises(AssertionError):
        check(schedule, [True, False, False], [1], TooEager)
    with pytest.raises(TimeoutError):
        run(schedule.controller(TooStrict), schedule.steps, [True, False, False], [1], patience=0.3)


async def startable(controller, group_ids):
    """Return the groups that may start now."""
    waiting = {group_id: asyncio.create_task(controller.acquire(group_id)) for group_id in group_ids}
    await spin(5)
    found = [group_id for group_id, waiter in waiting.items() if waiter.done()]
    for waiter in waiting.values():
        waiter.cancel()
    return found


def test_groups_start_as_early_as_allowed():
    async def look():
        controller = StalenessController(4, 4, max_staleness=0, refill=1)
        seen = [await startable(controller, range(20))]
        for _ in range(6):
            await controller.request_refill()
            seen.append(await startable(controller, range(20)))
        await controller.on_step_end(1)
        return seen, await startable(controller, range(20))

    during, after = asyncio.run(look())
    assert during == [list(range(number)) for number in (4, 5, 6, 7, 8, 8, 8)]
    assert after == list(range(12))


def test_a_resumed_controller_continues_with_its_groups_and_version():
    controller = StalenessController(2, 3, max_staleness=1, taken=7, version=4)

    async def startable(group_id):
        try:
            async with asyncio.timeout(0.01):
                return await controller.acquire(group_id)
        except TimeoutError:
            return None

    async def simulate():
        before = [await startable(group_id) for group_id in (7, 12, 13)]
        await controller.on_step_end(5)
        after = [await startable(group_id) for group_id in (12, 13)]
        return before, after

    assert asyncio.run(simulate()) == ([4, 4, None], [5, None])
