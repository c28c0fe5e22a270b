"""Which groups may start when: nothing waits for ever, nothing is staler than allowed, nothing starts in vain."""

import asyncio
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.core.task import Task
from agent_r1.rollout.collector import GroupRequest
from agent_r1.rollout.staleness import StalenessController


@dataclass(frozen=True)
class Pace:
    steps: int
    groups_per_step: int
    max_staleness: int
    refill: int

    def staleness(self, kind=StalenessController):
        return kind(self.steps, self.groups_per_step, max_staleness=self.max_staleness, refill=self.refill)


@dataclass(frozen=True)
class Lived:
    """The steps done when each group started, and the groups that each step took."""

    started: list
    taken: list


def order(serial):
    return GroupRequest(serial, Task("task", ()), 1)


async def spin(turns):
    for _ in range(turns):
        await asyncio.sleep(0)


async def live(staleness, steps, useful, pauses):
    """A run: groups take some turns of the event loop each, and so does every update."""
    started, taken = [], []
    under_way = asyncio.Queue()

    async def group(serial):
        await spin(pauses[serial % len(pauses)])
        return serial

    async def start():
        for serial in count():
            started.append(await staleness.acquire(order(serial)))
            under_way.put_nowait(asyncio.create_task(group(serial)))

    starter = asyncio.create_task(start())
    for step in range(steps):
        batch = []
        while len(batch) < staleness.groups_wanted:
            batch.append(await (await under_way.get()))
            if not useful[batch[-1] % len(useful)]:
                await staleness.request_refill()
        await spin(pauses[step % len(pauses)])
        taken.append(batch)
        await staleness.on_step_end(step + 1)
    await spin(50)
    starter.cancel()
    return Lived(started, taken)


def run(staleness, steps, useful, pauses, patience=2.0):
    """The run; TimeoutError where it is not over after ``patience`` seconds: it takes some hundred turns of a loop."""
    return asyncio.run(asyncio.wait_for(live(staleness, steps, useful, pauses), patience))


def expected(pace, useful):
    """What each step takes: the groups up to the last that is useful or may be asked for."""
    serials = count()
    for _ in range(pace.steps):
        batch = []
        while sum(useful[serial % len(useful)] for serial in batch) < pace.groups_per_step and len(
            batch
        ) < pace.groups_per_step * (1 + pace.refill):
            batch.append(next(serials))
        yield batch


def check(pace, useful, pauses, kind=StalenessController):
    lived = run(pace.staleness(kind), pace.steps, useful, pauses)
    assert lived.taken == list(expected(pace, useful))
    assert len(lived.started) == sum(map(len, lived.taken)), "a group was started in vain"
    for step, batch in enumerate(lived.taken):
        assert all(0 <= step - lived.started[serial] <= pace.max_staleness for serial in batch)
    return lived


paces = st.builds(Pace, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
usefulness = st.lists(st.booleans(), min_size=1, max_size=12)
turns = st.lists(st.integers(0, 6), min_size=1, max_size=7)


@settings(max_examples=200, deadline=None)
@given(paces, usefulness, turns)
def test_a_run_ends_within_its_staleness_and_starts_nothing_in_vain(pace, useful, pauses):
    check(pace, useful, pauses)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), usefulness, turns)
def test_without_staleness_and_refilling_each_group_starts_with_its_own_step(steps, groups, useful, pauses):
    lived = check(Pace(steps, groups, 0, 0), useful, pauses)
    assert lived.started == [serial // groups for serial in range(steps * groups)]


class Hasty(StalenessController):
    """Lets one group more start than is certain to be taken."""

    def _certain_groups(self):
        return super()._certain_groups() + 1


class Deaf(StalenessController):
    """Wants more groups where some teach nothing, and does not let them start."""

    def _certain_groups(self):
        return min(super()._certain_groups(), self._taken + self._groups_per_step)


def test_a_group_too_many_and_a_group_too_few_would_be_seen():
    pace = Pace(3, 2, 0, 2)
    check(pace, [True, False, False], [1])
    with pytest.raises(AssertionError):
        check(pace, [True, False, False], [1], Hasty)
    with pytest.raises(TimeoutError):
        run(pace.staleness(Deaf), pace.steps, [True, False, False], [1], patience=0.3)


async def permitted(staleness, serials):
    """Those of the groups that may start at once."""
    waiting = {serial: asyncio.create_task(staleness.acquire(order(serial))) for serial in serials}
    await spin(5)
    found = [serial for serial, permit in waiting.items() if permit.done()]
    for permit in waiting.values():
        permit.cancel()
    return found


def test_groups_start_as_early_as_they_may():
    async def look():
        staleness = StalenessController(4, 4, max_staleness=0, refill=1)
        seen = [await permitted(staleness, range(20))]
        for _ in range(6):
            await staleness.request_refill()
            seen.append(await permitted(staleness, range(20)))
        await staleness.on_step_end(1)
        return seen, await permitted(staleness, range(20))

    during, after = asyncio.run(look())
    assert during == [list(range(number)) for number in (4, 5, 6, 7, 8, 8, 8)]
    assert after == list(range(12))


def test_what_runs_ahead_never_runs_past_the_last_step():
    async def look():
        staleness = StalenessController(3, 2, max_staleness=2)
        seen = [await permitted(staleness, range(20))]
        for version in (1, 2, 3):
            await staleness.on_step_end(version)
            seen.append(await permitted(staleness, range(20)))
        return seen

    assert asyncio.run(look()) == [list(range(6))] * 4


def test_a_clock_that_begins_in_the_middle_counts_on_from_there():
    staleness = StalenessController(2, 3, max_staleness=1, taken=7, version=4)

    async def permitted(serial):
        try:
            async with asyncio.timeout(0.01):
                return await staleness.acquire(order(serial))
        except TimeoutError:
            return None

    async def live():
        before = [await permitted(serial) for serial in (7, 12, 13)]
        await staleness.on_step_end(5)
        after = [await permitted(serial) for serial in (12, 13)]
        return before, after

    assert asyncio.run(live()) == ([4, 4, None], [5, None])
