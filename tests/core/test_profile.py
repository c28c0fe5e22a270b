"""The profile of a step: each moment belongs to one part, or in equal shares to the parts that compute."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest

from agent_r1.core.profile import (
    NO_PROFILER,
    Part,
    PartTime,
    StepProfile,
    StepProfiler,
    format_profile,
    mean_profile,
    read_profiles,
)


@dataclass
class Clock:
    """Wall and CPU time that only the test advances."""

    now: float = 100.0
    cpu: float = 7.0

    def pass_time(self, seconds: float, cpu: float = 0.0) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + cpu


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def profiler(clock: Clock) -> StepProfiler:
    return StepProfiler(lambda: clock.now, lambda: clock.cpu)


def taken(profiler: StepProfiler) -> dict[Part, tuple[float, float]]:
    """Return the wall and CPU seconds of the parts that took time."""
    parts = profiler.take().parts
    return {part: (time.seconds, time.cpu_seconds) for part, time in parts.items() if time != PartTime()}


def test_a_part_gets_the_time_in_which_it_is_active(clock: Clock, profiler: StepProfiler) -> None:
    with profiler.measure(Part.FORWARD):
        clock.pass_time(2.0, cpu=1.5)
    with profiler.measure(Part.BACKWARD):
        clock.pass_time(3.0, cpu=3.0)
    assert taken(profiler) == {Part.FORWARD: (2.0, 1.5), Part.BACKWARD: (3.0, 3.0)}
    assert taken(profiler) == {}


def test_parts_that_compute_at_the_same_time_share_it(clock: Clock, profiler: StepProfiler) -> None:
    with profiler.measure(Part.GENERATION):
        with profiler.measure(Part.RENDERING), profiler.measure(Part.RENDERING):  # two episodes
            clock.pass_time(4.0, cpu=2.0)
        clock.pass_time(1.0)
    assert taken(profiler) == {Part.GENERATION: (3.0, 1.0), Part.RENDERING: (2.0, 1.0)}


def test_tools_count_only_while_nothing_computes(clock: Clock, profiler: StepProfiler) -> None:
    with profiler.measure(Part.TOOLS):
        with profiler.measure(Part.GENERATION):
            clock.pass_time(4.0)
        clock.pass_time(1.0)
    assert taken(profiler) == {Part.GENERATION: (4.0, 0.0), Part.TOOLS: (1.0, 0.0)}


def test_a_validation_counts_alone(clock: Clock, profiler: StepProfiler) -> None:
    with profiler.measure(Part.VALIDATION), profiler.measure(Part.GENERATION):
        clock.pass_time(2.0)
    assert taken(profiler) == {Part.VALIDATION: (2.0, 0.0)}


def test_time_without_a_part_is_waiting_or_other(clock: Clock, profiler: StepProfiler) -> None:
    clock.pass_time(5.0, cpu=2.0)
    clock.pass_time(0.0, cpu=1.0)
    assert taken(profiler) == {Part.OTHER: (3.0, 3.0), Part.WAITING: (2.0, 0.0)}
    clock.pass_time(1.0, cpu=2.0)  # two threads
    assert taken(profiler) == {Part.OTHER: (1.0, 2.0)}


def test_the_parts_add_up_to_the_step(clock: Clock, profiler: StepProfiler) -> None:
    order, active = random.Random(0), []
    began, cpu_began = clock.now, clock.cpu
    for _ in range(300):
        clock.pass_time(order.random(), order.random())
        if active and order.random() < 0.5:
            active.pop(order.randrange(len(active))).__exit__(None, None, None)
        else:
            active.append(profiler.measure(order.choice(list(Part)[:-2])))
            active[-1].__enter__()
    total = profiler.take().total
    assert (total.seconds, total.cpu_seconds) == pytest.approx((clock.now - began, clock.cpu - cpu_began))


def test_threads_measure_at_the_same_time() -> None:
    profiler = StepProfiler()

    def work(part: Part) -> None:
        for _ in range(500):
            with profiler.measure(part):
                pass

    parts = (Part.FORWARD, Part.STORE, Part.FORWARD, Part.RENDERING)
    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = profiler.take().parts
    assert all(times[part].seconds > 0 for part in parts)
    profiler.take()
    assert all(profiler.take().parts[part] == PartTime() for part in parts)  # no part stayed active


def test_recorded_numbers_give_the_profile_again() -> None:
    steps = [
        StepProfile({Part.FORWARD: PartTime(1.0, 0.5), Part.OTHER: PartTime(0.5, 0.5)}),
        StepProfile({Part.FORWARD: PartTime(3.0, 1.5), Part.TOOLS: PartTime(1.0, 0.0)}),
    ]
    curves: dict[str, dict[int, float]] = {"reward": {1: 0.5, 2: 0.5, 3: 0.5}}
    for step, profile in enumerate(steps, start=2):
        for name, value in profile.timings().items():
            curves.setdefault(name, {})[step] = value
    assert read_profiles(curves) == steps
    mean = {Part.TOOLS: PartTime(0.5, 0.0), Part.FORWARD: PartTime(2.0, 1.0), Part.OTHER: PartTime(0.25, 0.25)}
    assert mean_profile(steps) == StepProfile(mean)
    assert read_profiles({"reward": {1: 0.5}}) == [] and mean_profile([]) == StepProfile({})


def test_a_table_has_the_shares_of_the_parts() -> None:
    table = format_profile(StepProfile({Part.FORWARD: PartTime(3.0, 2.0), Part.STORE: PartTime(1.0)}), "a step")
    assert [line.split() for line in table.splitlines()] == [
        ["a", "step", "seconds", "share", "CPU", "seconds"],
        ["forward", "3.000", "75", "%", "2.000"],
        ["store", "1.000", "25", "%", "0.000"],
        ["all", "4.000", "100", "%", "2.000"],
    ]
    assert "all" in format_profile(StepProfile({Part.FORWARD: PartTime()}), "a step")


def test_no_profiler_measures_nothing() -> None:
    with NO_PROFILER.measure(Part.FORWARD), NO_PROFILER.measure(Part.TOOLS):
        pass
    assert NO_PROFILER.take() == StepProfile({})
