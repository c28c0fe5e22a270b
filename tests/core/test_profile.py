"""The profile of a step: each moment belongs to one part, or in equal shares to the parts that compute."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack

import pytest

from agent_r1.core import profile
from agent_r1.core.profile import (
    CPU_SECONDS,
    PARTS,
    SECONDS,
    StepProfiler,
    format_profile,
    measure,
    profiling,
)


class Clock:
    """Wall and CPU time that only the test advances, and a profiler that reads them."""

    def __init__(self) -> None:
        self.now, self.cpu = 100.0, 7.0

    def start(self) -> None:
        self.profiler = StepProfiler()

    def pass_time(self, seconds: float, cpu: float = 0.0) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + cpu

    def take(self) -> dict[str, tuple[float, float]]:
        """Return the wall and CPU seconds of the parts that took time."""
        taken = self.profiler.take()
        times = {part: (taken[SECONDS + part], taken[CPU_SECONDS + part]) for part in PARTS}
        return {part: time for part, time in times.items() if any(time)}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(profile, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(profile, "process_time", lambda: clock.cpu)
    clock.start()
    with profiling(clock.profiler):
        yield clock


def test_a_part_gets_the_time_in_which_it_is_active(clock):
    with measure("forward"):
        clock.pass_time(2.0, cpu=1.5)

    @measure("backward")
    def backward():
        clock.pass_time(1.5, cpu=1.5)

    backward()
    backward()
    assert clock.take() == {"forward": (2.0, 1.5), "backward": (3.0, 3.0)}
    assert clock.take() == {}


def test_parts_that_compute_at_the_same_time_share_it(clock):
    with measure("generation"):
        with measure("rendering"), measure("rendering"):  # two episodes
            clock.pass_time(4.0, cpu=2.0)
        clock.pass_time(1.0)
    assert clock.take() == {"generation": (3.0, 1.0), "rendering": (2.0, 1.0)}


def test_time_without_a_part_is_waiting_or_other(clock):
    clock.pass_time(5.0, cpu=2.0)
    clock.take()
    clock.pass_time(1.0, cpu=2.0)  # two threads
    assert clock.take() == {"other": (1.0, 2.0)}
    clock.pass_time(5.0, cpu=2.0)
    assert clock.take() == {"other": (2.0, 2.0), "waiting": (3.0, 0.0)}


def test_the_parts_add_up_to_the_step(clock):
    order, active = random.Random(0), []
    began, cpu_began = clock.now, clock.cpu
    for _ in range(300):
        clock.pass_time(order.random(), order.random())
        if active and order.random() < 0.5:
            active.pop(order.randrange(len(active))).close()
        else:
            active.append(ExitStack())
            active[-1].enter_context(measure(order.choice(PARTS[:-2])))
    times = clock.take().values()
    total = (sum(wall for wall, _ in times), sum(cpu for _, cpu in times))
    assert total == pytest.approx((clock.now - began, clock.cpu - cpu_began))


def test_threads_measure_at_the_same_time():
    def work(part):
        for _ in range(500):
            with measure(part):
                pass

    profiler, parts = StepProfiler(), ("forward", "store", "forward", "rendering")
    with profiling(profiler):
        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    taken = profiler.take()
    assert all(taken[SECONDS + part] > 0 for part in parts)
    taken = profiler.take()
    assert all(taken[SECONDS + part] == 0 for part in parts)  # no part stayed active


def test_a_table_has_the_shares_of_the_parts():
    parts = {"profile/forward": 3.0, "profile_cpu/forward": 2.0, "profile/store": 1.0, "profile/tools": 0.0}
    assert [line.split() for line in format_profile(parts, "a step").splitlines()] == [
        ["a", "step", "seconds", "share", "CPU", "seconds"],
        ["forward", "3.000", "75", "%", "2.000"],
        ["store", "1.000", "25", "%", "0.000"],
        ["all", "4.000", "100", "%", "2.000"],
    ]
    assert "all" in format_profile({"profile/forward": 0.0}, "a step")
