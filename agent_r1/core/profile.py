"""Where the time of a training step goes: ``with measure("forward"):`` marks work, ``--profile`` prints a table."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter, process_time
from typing import Literal, get_args

# "generation": decode steps. "publish": transfer of weights to the engine. "store": the run's database, and copies of
# weights for checkpoints. "waiting", "other": outside of all parts, the process computed nothing, or something else.
EnginePart = Literal["generation", "prefill", "sampling", "servers"]
RolloutPart = Literal["tools", "rewards", "rendering"]
TrainerPart = Literal["packing", "forward", "backward", "optimizer", "ranks"]
Part = Literal[EnginePart, RolloutPart, TrainerPart, "publish", "store", "validation", "waiting", "other"]
PARTS: tuple[str, ...] = get_args(Part)

_IN_FLIGHT = frozenset({"servers", "tools", "rewards", "ranks"})  # these often only wait, for example for a server
SECONDS, CPU_SECONDS = "profile/", "profile_cpu/"  # a profile is {"profile/forward": 0.2, "profile_cpu/forward": ..}


class StepProfiler:
    """A profiler that divides wall time, and the CPU time of the process, among the active parts of a step.

    The parts add up to the step: parts that are active together share the time equally. But a validation gets all of
    its time, and servers, tools, rewards and ranks only get the time in which no other part is active. Work on a GPU
    counts for the part that waits for the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = Counter[str]()  # threads and asyncio tasks inside of each part
        self._last, self._last_cpu = perf_counter(), process_time()
        self._times = dict.fromkeys((prefix + part for prefix in (SECONDS, CPU_SECONDS) for part in PARTS), 0.0)

    def switch(self, part: Part, change: Literal[1, -1]) -> None:
        """Enter or leave ``part``."""
        with self._lock:
            self._distribute()
            self._active[part] += change

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, by metric name."""
        with self._lock:
            self._distribute()
            times, self._times = self._times, dict.fromkeys(self._times, 0.0)
            return times

    def _distribute(self) -> None:
        now, cpu_now = perf_counter(), process_time()
        wall, cpu = now - self._last, cpu_now - self._last_cpu
        self._last, self._last_cpu = now, cpu_now
        active = [part for part, count in self._active.items() if count]
        active = ["validation"] if "validation" in active else active
        active = [part for part in active if part not in _IN_FLIGHT] or active
        shares = [(part, wall / len(active), cpu / len(active)) for part in active]
        busy = min(wall, cpu)
        for part, seconds, cpu_seconds in shares or [("other", busy, cpu), ("waiting", wall - busy, 0.0)]:
            self._times[SECONDS + part] += seconds
            self._times[CPU_SECONDS + part] += cpu_seconds


_profiler: StepProfiler | None = None  # one for the process and all of its threads, as CPU time is


@contextmanager
def profiling(profiler: StepProfiler | None) -> Iterator[None]:
    """Give the times of :func:`measure` to ``profiler`` during the ``with`` block. None: nothing is measured."""
    global _profiler
    before, _profiler = _profiler, profiler
    try:
        yield
    finally:
        _profiler = before


@contextmanager
def measure(part: Part) -> Iterator[None]:
    """Measure a ``with`` block, or a decorated function, as a part of the step."""
    profiler = _profiler
    if profiler is not None:
        profiler.switch(part, 1)
    try:
        yield
    finally:
        if profiler is not None:
            profiler.switch(part, -1)


def mean_profile(curves: Mapping[str, Mapping[int, float]], first_step: int = 1) -> dict[str, float]:
    """Return the mean profile of the recorded steps from ``first_step`` on. ``curves`` is ``{name: {step: value}}``."""
    recorded = {name: curve for name, curve in curves.items() if name.startswith((SECONDS, CPU_SECONDS))}
    values = {name: [curve[step] for step in curve if step >= first_step] for name, curve in recorded.items()}
    return {name: fmean(of_steps) for name, of_steps in values.items() if of_steps}


def format_profile(profile: Mapping[str, float], title: str) -> str:
    """Return a profile as a table of text, without parts below half a millisecond."""
    times = {part: (profile.get(SECONDS + part, 0.0), profile.get(CPU_SECONDS + part, 0.0)) for part in PARTS}
    total = tuple(map(sum, zip(*times.values(), strict=True)))
    shown = {part: time for part, time in times.items() if time[0] >= 0.0005}
    width = max(len(title), *(len(part) + 2 for part in (*shown, "all")))
    lines = [f"{title:<{width}}  seconds  share  CPU seconds"]
    for part, (wall, cpu) in {**shown, "all": total}.items():
        share = 100 * wall / total[0] if total[0] else 0.0
        lines.append(f"{'  ' + part:<{width}}  {wall:7.3f}  {share:3.0f} %  {cpu:11.3f}")
    return "\n".join(lines)
